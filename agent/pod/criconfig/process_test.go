package criconfig

import (
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// F98, F115: every stop signal of CRI has a name in the API, and the same signal again from that name.
func TestStopSignals(t *testing.T) {
	for n, name := range cri.Signal_name {
		signal := cri.Signal(n)
		got := SignalFromCRI(signal)
		if signal == cri.Signal_SIGNAL_RUNTIME_DEFAULT {
			if got != nil {
				t.Errorf("%s is %q in the API", name, *got)
			}
			continue
		}
		if got == nil || signalToCRI(*got) != signal {
			t.Errorf("%s is %v in the API, and %v again", name, got, signalToCRI(*got))
		}
	}
	for api, want := range map[v1.Signal]cri.Signal{
		v1.SIGTERM: cri.Signal_SIGNAL_SIGTERM, v1.SIGRTMINPLUS3: cri.Signal_SIGNAL_SIGRTMINPLUS3,
		v1.SIGRTMAXMINUS1: cri.Signal_SIGNAL_SIGRTMAXMINUS1, "SIGNONE": cri.Signal_SIGNAL_RUNTIME_DEFAULT,
	} {
		if got := signalToCRI(api); got != want {
			t.Errorf("%s is %s in CRI, want %s", api, got, want)
		}
	}
}

// F115: the user of a container is that of its first process.
func TestContainerUser(t *testing.T) {
	if got := ContainerUser(nil); got != nil {
		t.Errorf("a container without a reported user has user %+v", got)
	}
	got := ContainerUser(&cri.ContainerUser{Linux: &cri.LinuxContainerUser{Uid: 7, Gid: 8,
		SupplementalGroups: []int64{9, 10}}})
	if got == nil || got.Linux.UID != 7 || got.Linux.GID != 8 || !slices.Equal(got.Linux.SupplementalGroups,
		[]int64{9, 10}) {
		t.Errorf("user %+v", got)
	}
}
