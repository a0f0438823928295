package wakeup

import "testing"

func TestSignal(t *testing.T) {
	s := New()
	select {
	case <-s:
		t.Fatal("a new signal is received")
	default:
	}
	s.Send()
	s.Send() // does not block, and adds nothing
	<-s
	select {
	case <-s:
		t.Error("two signals before a receive are received twice")
	default:
	}
	s.Send()
	<-s
}

func TestNilSignal(t *testing.T) {
	var s Signal
	s.Send()
	select {
	case <-s:
		t.Error("a nil signal is received")
	default:
	}
}
