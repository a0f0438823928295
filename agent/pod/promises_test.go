package pod

import (
	"fmt"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent/pod/lifecycle"
)

// The termination messages of all containers together fit into 12 KiB. A mount's status reports how
// far the mount is read-only.
func TestStatusTellsOfMountsAndLastWords(t *testing.T) {
	p := simplePod("u1")
	p.Spec.Containers = nil
	o := lifecycle.Observed{Sandboxes: []lifecycle.Sandbox{{ID: "s", Ready: true}}}
	for i := range 6 {
		name := fmt.Sprintf("c%d", i)
		p.Spec.Containers = append(p.Spec.Containers, v1.Container{Name: name, VolumeMounts: []v1.VolumeMount{
			{Name: "v", MountPath: "/w"}, {Name: "v", MountPath: "/r", ReadOnly: true},
			{Name: "v", MountPath: "/rr", ReadOnly: true, RecursiveReadOnly: new(v1.RecursiveReadOnlyIfPossible)},
		}})
		c := lifecycle.Container{ID: name, Name: name, Sandbox: "s", State: lifecycle.Exited, ExitCode: 1,
			Message: strings.Repeat("ä", 2048)}
		if i == 0 {
			c.State = lifecycle.Running
		}
		o.Containers = append(o.Containers, c)
	}
	st := lifecycle.Status(lifecycle.Desired{Pod: p}, o, v1.PodStatus{}, lifecycle.Host{}, time.Now())
	total := 0
	for _, cs := range st.ContainerStatuses {
		for _, s := range []v1.ContainerState{cs.State, cs.LastTerminationState} {
			if s.Terminated != nil {
				total += len(s.Terminated.Message)
			}
		}
	}
	if total > lifecycle.MaxMessages || total < 9<<10 {
		t.Errorf("%d bytes of last words", total)
	}
	var got []string
	for _, m := range st.ContainerStatuses[0].VolumeMounts {
		if m.RecursiveReadOnly != nil {
			got = append(got, m.MountPath+" "+string(*m.RecursiveReadOnly))
		}
	}
	if want := "/r Disabled, /rr Enabled"; strings.Join(got, ", ") != want {
		t.Errorf("mounts %q, want %q", got, want)
	}
}
