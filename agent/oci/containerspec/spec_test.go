package containerspec

import "testing"

func TestSignalNumbers(t *testing.T) {
	for name, want := range map[string]int{"SIGTERM": 15, "term": 15, "9": 9, "": 15, "SIGRTMIN+3": 37, "RTMIN": 34,
		"SIGRTMINPLUS3": 37, "SIGRTMAX": 64, "nonsense": 15, "SIGRTMIN+99": 15} {
		if got := parseSignal(name); got != want {
			t.Errorf("signalNumber(%q) = %d, want %d", name, got, want)
		}
	}
}
