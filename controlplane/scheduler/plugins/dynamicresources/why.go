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

// explaining bounds the time that one scheduling attempt spends on finding out which devices nodes
// lack.
const explaining = 500 * time.Millisecond

const cannot = "cannot allocate all claims"

var unexplained = framework.RefuseForGood(Name, cannot)

// explainNode returns the refusal of a node that lacks devices. The message contains, for each
// request, how many devices the node could allocate for that request alone. If each request alone
// succeeds, only the requests together fail. After the deadline of the attempt the message is
// general.
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

// missingDevices returns a text about the devices that a node lacks for one request, or "" if it
// could allocate enough. The second result is false if the allocator fails or exceeds the deadline.
func (st *state) missingDevices(ctx context.Context, node *v1.Node, claim *resourcev1.ResourceClaim, r *resourcev1.DeviceRequest) (string, bool) {
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
	if want == 1 || gets(1) { // for one device it is usually known that none exists
		most = sort.Search(want, func(n int) bool { return failed != nil || !gets(int64(n+1)) })
	}
	if failed != nil || most == want {
		return "", failed == nil
	}
	return fmt.Sprintf("%d of %d devices of class %s %s", most, want, r.Exactly.DeviceClassName, of), true
}
