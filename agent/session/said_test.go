package session

import (
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// P9, F128: the stored statuses are those of pods with containers that may end for good.
func TestStatusesToStore(t *testing.T) {
	assigned := map[types.UID]*v1.Pod{}
	s := newReportedStatuses()
	for name, spec := range map[types.UID]v1.PodSpec{
		"always": {RestartPolicy: v1.RestartPolicyAlways},
		"never":  {RestartPolicy: v1.RestartPolicyNever},
		"debugged": {RestartPolicy: v1.RestartPolicyAlways,
			EphemeralContainers: []v1.EphemeralContainer{{TargetContainerName: "app"}}},
		"gone": {RestartPolicy: v1.RestartPolicyNever},
	} {
		if name != "gone" {
			assigned[name] = &v1.Pod{Spec: spec}
		}
		s.setStatus(&v1.Pod{ObjectMeta: metav1.ObjectMeta{UID: name}})
	}
	for range 2 { // dropped statuses stay dropped
		stored := map[types.UID]bool{}
		for _, o := range s.statusesToStore(func(uid types.UID) *v1.Pod { return assigned[uid] }) {
			stored[o.object.GetUID()] = true
		}
		if len(stored) != 2 || !stored["never"] || !stored["debugged"] {
			t.Errorf("stored: %v", stored)
		}
	}
}
