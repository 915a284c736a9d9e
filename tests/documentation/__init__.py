"""What makes and checks the pages: the tables and pictures in them, their blocks of code, and the site."""
