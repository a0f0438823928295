package dynamicresources

import (
	"context"
	"fmt"
	"sort"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// explainTimeout bounds the time that one scheduling attempt spends in explainNode, to find out
// which devices are missing on nodes.
const explainTimeout = 500 * time.Millisecond

const cannot = "cannot allocate all claims"

var unexplained = framework.RefuseForGood(Name, cannot)

// explainNode returns the refusal of a node on which the allocator found too few devices. For each
// device request, the message contains how many devices the node has if the other requests are
// ignored. If each request alone could be satisfied, the message says so. After the time limit of
// the attempt, the message is a general one.
func (st *state) explainNode(ctx context.Context, node *v1.Node) *framework.Status {
	if st.explain.IsZero() {
		st.explain = time.Now().Add(st.explains)
	}
	ctx, cancel := context.WithDeadline(ctx, st.explain)
	defer cancel()
	var lacks []string
	for _, claim := range st.wanting {
		for i := range claim.Spec.Devices.Requests {
			lack, ok := st.missingDevices(ctx, node, claim, &claim.Spec.Devices.Requests[i])
			if !ok {
				return unexplained
			}
			if lack != "" {
				lacks = append(lacks, lack)
			}
		}
	}
	if len(lacks) == 0 {
		return framework.RefuseForGood(Name, cannot+": there are devices for each request, but not for all together")
	}
	return framework.RefuseForGood(Name, cannot+": "+strings.Join(lacks, "; "))
}

// missingDevices returns a text about the devices that are missing on the node for the device
// request r, if other requests are ignored. It returns "" if enough devices are free. The second
// result is false if the allocator fails or the time limit has passed.
func (st *state) missingDevices(
	ctx context.Context, node *v1.Node, claim *resourcev1.ResourceClaim, r *resourcev1.DeviceRequest,
) (string, bool) {
	var failed error
	gets := func(count int64) bool {
		alone := &resourcev1.ResourceClaim{ObjectMeta: claim.ObjectMeta}
		one := *r.DeepCopy()
		if one.Exactly != nil && one.Exactly.AllocationMode == resourcev1.DeviceAllocationModeExactCount {
			one.Exactly.Count = count
		}
		alone.Spec.Devices.Requests = []resourcev1.DeviceRequest{one}
		found, err := st.allocator.Allocate(ctx, node, []*resourcev1.ResourceClaim{alone})
		if err != nil {
			failed = err
		}
		return found != nil
	}
	of := fmt.Sprintf("(request %s of resourceclaim %s)", r.Name, claim.Name)
	switch {
	case r.Exactly == nil:
		if gets(0) || failed != nil {
			return "", failed == nil
		}
		return "none of the alternatives " + of, true
	case r.Exactly.AllocationMode == resourcev1.DeviceAllocationModeAll:
		if gets(0) || failed != nil {
			return "", failed == nil
		}
		return fmt.Sprintf("no devices of class %s, or not all of them free %s", r.Exactly.DeviceClassName, of), true
	}
	want := int(r.Exactly.Count)
	most := 0
	if want == 1 || gets(1) { // test one device first: usually the node has none
		most = sort.Search(want, func(n int) bool { return failed != nil || !gets(int64(n+1)) })
	}
	if failed != nil || most == want {
		return "", failed == nil
	}
	return fmt.Sprintf("%d of %d devices of class %s %s", most, want, r.Exactly.DeviceClassName, of), true
}
