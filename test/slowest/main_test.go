package main

import (
	"strings"
	"testing"
)

// Output of tests that pass is dropped. Output of failed tests and packages, and lines that are not
// events, are printed. The slowest tests follow.
func TestReport(t *testing.T) {
	const events = `{"Action":"start","Package":"p/a"}
{"Action":"run","Package":"p/a","Test":"TestGood"}
{"Action":"output","Package":"p/a","Test":"TestGood","Output":"=== RUN   TestGood\n"}
{"Action":"output","Package":"p/a","Test":"TestGood","Output":"chatter\n"}
{"Action":"pass","Package":"p/a","Test":"TestGood","Elapsed":2.5}
{"Action":"output","Package":"p/a","Test":"TestBad/sub","Output":"    why\n"}
{"Action":"fail","Package":"p/a","Test":"TestBad/sub","Elapsed":9}
{"Action":"output","Package":"p/a","Test":"TestBad","Output":"--- FAIL: TestBad (9.00s)\n"}
{"Action":"fail","Package":"p/a","Test":"TestBad","Elapsed":9}
{"Action":"output","Package":"p/a","Output":"FAIL\n"}
{"Action":"output","Package":"p/a","Output":"FAIL\tp/a\t11.5s\n"}
{"Action":"fail","Package":"p/a","Elapsed":11.5}
go: no event
{"Action":"output","Package":"p/b","Test":"TestPanics","Output":"panic: x\n"}
{"Action":"output","Package":"p/b","Output":"FAIL\tp/b\t0.1s\n"}
{"Action":"fail","Package":"p/b","Elapsed":0.1}
{"Action":"output","Package":"p/c","Output":"PASS\n"}
{"Action":"output","Package":"p/c","Output":"ok  \tp/c\t0.2s\n"}
{"Action":"pass","Package":"p/c","Elapsed":0.2}
`
	const want = `    why
--- FAIL: TestBad (9.00s)
FAIL
FAIL	p/a	11.5s
go: no event
FAIL	p/b	0.1s
panic: x
ok  	p/c	0.2s
== the 2 slowest tests
     9.0 s  p/a TestBad
     2.5 s  p/a TestGood
`
	var out strings.Builder
	if err := filterEvents(strings.NewReader(events), &out, 20); err != nil || out.String() != want {
		t.Errorf("%v\n got %s\nwant %s", err, out.String(), want)
	}
}
