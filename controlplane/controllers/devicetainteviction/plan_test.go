package devicetainteviction

import (
	"fmt"
	"testing"
	"time"

	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

var added = time.Unix(1000, 0)

func taint(key string, effect resourcev1.DeviceTaintEffect, after time.Duration) resourcev1.DeviceTaint {
	at := metav1.NewTime(added.Add(after))
	return resourcev1.DeviceTaint{Key: key, Value: "yes", Effect: effect, TimeAdded: &at}
}

func toleration(key string, seconds int64) resourcev1.DeviceToleration {
	t := resourcev1.DeviceToleration{Key: key, Operator: resourcev1.DeviceTolerationOpExists}
	if seconds != forever {
		t.TolerationSeconds = &seconds
	}
	return t
}

const forever = -100

// Pods are evicted by the first NoExecute taint of a device that no toleration tolerates forever.
func TestEviction(t *testing.T) {
	const run, sched = resourcev1.DeviceTaintEffectNoExecute, resourcev1.DeviceTaintEffectNoSchedule
	sick := taint("sick", run, 0)
	type list = []resourcev1.DeviceTaint
	type bears = []resourcev1.DeviceToleration
	for name, c := range map[string]struct {
		a, b  list // of the two devices
		bears bears
		want  string
	}{
		"no taint":              {nil, nil, nil, "stays"},
		"one only for new pods": {list{taint("sick", sched, 0)}, nil, nil, "stays"},
		"not borne":             {list{sick}, nil, nil, "0s"},
		"of the other device":   {nil, list{sick}, nil, "0s"},
		"another is borne":      {list{sick}, nil, bears{toleration("old", forever)}, "0s"},
		"borne for ever":        {list{sick}, nil, bears{toleration("sick", forever)}, "stays"},
		"whatever it is":        {list{sick}, nil, bears{toleration("", forever)}, "stays"},
		"borne for a while":     {list{sick}, nil, bears{toleration("sick", 30)}, "30s"},
		"the shortest time counts": {list{sick}, nil,
			bears{toleration("sick", 30), toleration("", forever), toleration("sick", 20)}, "20s"},
		"less than none": {list{sick}, nil, bears{toleration("sick", -5)}, "0s"},
		"the first of two taints": {list{taint("sick", run, time.Minute)}, list{taint("old", run, time.Second)},
			bears{toleration("old", 3)}, "4s"},
		"by value": {list{sick}, nil,
			bears{{Key: "sick", Operator: resourcev1.DeviceTolerationOpEqual, Value: "no"}}, "0s"},
		"by value, the right one": {list{sick}, nil,
			bears{{Key: "sick", Operator: resourcev1.DeviceTolerationOpEqual, Value: "yes"}}, "stays"},
		"of another effect": {list{sick}, nil,
			bears{{Key: "sick", Operator: resourcev1.DeviceTolerationOpExists, Effect: sched}}, "0s"},
		"nobody knows since when":   {list{{Key: "sick", Effect: run}}, nil, bears{toleration("sick", 30)}, "at once"},
		"a taint of no consequence": {list{taint("sick", "None", 0)}, nil, nil, "stays"},
	} {
		claim := &resourcev1.ResourceClaim{Status: resourcev1.ResourceClaimStatus{
			Allocation: &resourcev1.AllocationResult{}}}
		for _, device := range []string{"a", "b"} {
			claim.Status.Allocation.Devices.Results = append(claim.Status.Allocation.Devices.Results,
				resourcev1.DeviceRequestAllocationResult{Driver: "gpu.example.com", Pool: "w1", Device: device,
					Tolerations: c.bears})
		}
		at, evict := Eviction(claim, func(driver, pool, device string) []resourcev1.DeviceTaint {
			return map[string]list{"gpu.example.com w1 a": c.a, "gpu.example.com w1 b": c.b}[driver+" "+pool+" "+device]
		})
		got := "stays"
		switch {
		case evict && at.IsZero():
			got = "at once"
		case evict:
			got = fmt.Sprint(at.Sub(added))
		}
		if got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
	if _, evict := Eviction(&resourcev1.ResourceClaim{}, nil); evict {
		t.Error("a claim without devices evicts")
	}
}

// Of a pool that is being replaced, the newest generation counts.
func TestNewest(t *testing.T) {
	slice := func(name string, generation int64) *resourcev1.ResourceSlice {
		return &resourcev1.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: resourcev1.ResourceSliceSpec{Pool: resourcev1.ResourcePool{Generation: generation}}}
	}
	var got []string
	for _, s := range Newest([]*resourcev1.ResourceSlice{slice("a", 1), slice("b", 3), slice("c", 2), slice("d", 3)}) {
		got = append(got, s.Name)
	}
	if fmt.Sprint(got) != "[b d]" {
		t.Errorf("%v", got)
	}
}
