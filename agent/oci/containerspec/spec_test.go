package containerspec

import (
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestSignalNumbers(t *testing.T) {
	for name, want := range map[string]int{"SIGTERM": 15, "term": 15, "9": 9, "": 15, "SIGRTMIN+3": 37, "RTMIN": 34,
		"SIGRTMINPLUS3": 37, "SIGRTMAX": 64, "nonsense": 15, "SIGRTMIN+99": 15} {
		if got := parseSignal(name); got != want {
			t.Errorf("signalNumber(%q) = %d, want %d", name, got, want)
		}
	}
}

// F98: the stop signal of a container is reported in the form of CRI.
func TestSignalToCRI(t *testing.T) {
	for number, want := range map[int]cri.Signal{
		0: cri.Signal_SIGNAL_RUNTIME_DEFAULT, 15: cri.Signal_SIGNAL_SIGTERM, 10: cri.Signal_SIGNAL_SIGUSR1,
		34: cri.Signal_SIGNAL_SIGRTMIN, 37: cri.Signal_SIGNAL_SIGRTMINPLUS3, 49: cri.Signal_SIGNAL_SIGRTMINPLUS15,
		50: cri.Signal_SIGNAL_SIGRTMAXMINUS14, 64: cri.Signal_SIGNAL_SIGRTMAX, 99: cri.Signal_SIGNAL_RUNTIME_DEFAULT,
	} {
		if got := SignalToCRI(number); got != want {
			t.Errorf("signal %d is %s, want %s", number, got, want)
		}
	}
}
