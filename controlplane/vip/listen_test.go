package vip

import (
	"errors"
	"net"
	"testing"
)

// The API is served at the shared address although no interface has it yet, and both listeners end together.
func TestListensAtTheSharedAddress(t *testing.T) {
	own, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	probe, err := net.Listen("tcp", "127.0.0.77:0")
	if err != nil {
		t.Fatal(err)
	}
	port := probe.Addr().(*net.TCPAddr).Port
	probe.Close()
	elsewhere, err := Listen(own, "192.0.2.200", port) // of no interface
	if err != nil {
		t.Fatal(err)
	}
	elsewhere.Close()
	if own, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	l, err := Listen(own, "127.0.0.77", port)
	if err != nil {
		t.Fatal(err)
	}
	if l.Addr().String() != own.Addr().String() {
		t.Errorf("its address is %s", l.Addr())
	}
	for _, at := range []string{own.Addr().String(), (&net.TCPAddr{IP: net.IPv4(127, 0, 0, 77), Port: port}).String()} {
		out, err := net.Dial("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		in, err := l.Accept()
		if err != nil || in.LocalAddr().String() != at {
			t.Errorf("%s: %v", at, err)
		}
		in.Close()
		out.Close()
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("after the end: %v", err)
	}
	if _, err := net.Dial("tcp", own.Addr().String()); err == nil {
		t.Error("the first listener goes on")
	}
}
