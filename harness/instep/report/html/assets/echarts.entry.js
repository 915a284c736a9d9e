// The parts of Apache ECharts that the page uses; echarts.txt says how echarts.js.gz is made of this file.
import { graphic, init, use } from "echarts/core";
import { CustomChart, LineChart } from "echarts/charts";
import { DataZoomComponent, GridComponent, TooltipComponent, VisualMapComponent } from "echarts/components";
import { CanvasRenderer } from "echarts/renderers";
use([CustomChart, LineChart, DataZoomComponent, GridComponent, TooltipComponent, VisualMapComponent, CanvasRenderer]);
window.echarts = { graphic, init };
