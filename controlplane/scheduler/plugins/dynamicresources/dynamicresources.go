// Package dynamicresources is the plugin DynamicResources, which allocates devices to pods with
// ResourceClaims (resource.k8s.io). It restricts a pod to nodes on which its claims have devices or
// can get devices. It chooses devices with Kubernetes' allocator, and writes the allocation into
// the claims before the pod is bound.
package dynamicresources

import (
	"context"
	"errors"
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/dynamic-resource-allocation/structured"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// Name is the name of the plugin in a KubeSchedulerConfiguration.
const Name = "DynamicResources"

// maxErrors is the maximum number of errors of the device allocator that one scheduling attempt
// reports in detail. For further errors, the node is refused with a general message.
const maxErrors = 8

// Default values of the plugin's arguments.
const (
	// DefaultSearch bounds the time that one attempt spends on searching for devices, on all nodes
	// together. The allocator tries all combinations of devices, and other pods wait meanwhile.
	DefaultSearch = 2 * time.Second
	// DefaultPatience bounds how long a pod waits on its chosen node until drivers have prepared
	// its devices.
	DefaultPatience = 10 * time.Minute
)

// features are the enabled features of Kubernetes' device allocator: all except those that require
// support by the node agent, which does not have it.
var features = func() structured.Features {
	f := structured.Features{AdminAccess: true, CompatibilityGroups: true, ConsumableCapacity: true,
		DerivedAttributes:      true,
		DeviceBindingAndStatus: true, DeviceTaints: true, FractionalCapacityRange: true, ListTypeAttributes: true,
		PartitionableDevices: true, PrioritizedList: true}
	return f
}()

var (
	elsewhere = framework.RefuseForGood(Name, "resourceclaim not available on the node")
	tooLong   = framework.RefuseForGood(Name, "timed out trying to allocate devices")
)

// Plugin restricts pods with ResourceClaims to nodes with suitable devices, and allocates the
// devices.
type Plugin struct {
	h        *framework.Handle
	patience time.Duration
	search   time.Duration
	explains time.Duration
	*Ledger
}

// New returns the plugin. ledger records the devices in use and is shared by all profiles. search
// bounds the search for devices in one attempt. patience bounds the time that PreBind waits until
// drivers have prepared the devices.
func New(h *framework.Handle, ledger *Ledger, search, patience time.Duration) *Plugin {
	return &Plugin{h: h, patience: patience, search: search, explains: explainTimeout, Ledger: ledger}
}

// Name implements framework.Plugin: it returns the name of the plugin.
func (*Plugin) Name() string { return Name }

// state is the data of DynamicResources for one scheduling attempt. PreFilter stores it in the
// Cycle.
type state struct {
	claims    []*claimState
	wanting   []*resourcev1.ResourceClaim // the pod's claims without allocated devices, in the order of claims
	allocator structured.Allocator
	classes   classes
	until     time.Time // deadline of the search for devices in this attempt
	explains  time.Duration
	explain   time.Time // deadline of explainNode in this attempt; set by its first call
	errors    int       // number of errors that the allocator has returned
	found     map[string][]resourcev1.AllocationResult
}

// claimState is the data of DynamicResources for one ResourceClaim of the pod in a scheduling
// attempt.
type claimState struct {
	claim *resourcev1.ResourceClaim
	// nodes on which the claim's allocated devices are available; nil = on all nodes, or no devices
	// are allocated
	nodes    *nodeaffinity.NodeSelector
	unusable bool // Filter has refused a node because the claim's devices are not available there

	chosen *resourcev1.AllocationResult // allocation that Reserve chose; nil = the claim already has devices
	sent   *SentAllocation              // last attempt to write chosen; nil = not written
	stored *resourcev1.ResourceClaim    // the claim after PreBind has written it
	failed bool                         // PreBind failed because the claim's devices did not become ready
}

// PreFilter implements framework.PreFilter: it looks up the pod's ResourceClaims and refuses the
// pod if one of them is missing or unusable.
func (p *Plugin) PreFilter(ctx context.Context, c *framework.Cycle) (map[string]struct{}, *framework.Status) {
	pod := c.Pod.Pod
	if len(pod.Spec.ResourceClaims) == 0 {
		return nil, framework.SkipStatus
	}
	st := &state{until: time.Now().Add(p.search), explains: p.explains,
		found: map[string][]resourcev1.AllocationResult{}, classes: classes{p.h}}
	seen := map[types.UID]bool{}
	for i := range pod.Spec.ResourceClaims {
		claim, s := p.findClaim(pod, &pod.Spec.ResourceClaims[i])
		if s != nil {
			return nil, s
		}
		if claim == nil || seen[claim.UID] {
			continue
		}
		seen[claim.UID] = true
		if s := p.addClaim(st, pod, claim); s != nil {
			return nil, s
		}
	}
	if len(st.wanting) > 0 {
		var err error
		st.allocator, err = structured.NewAllocator(ctx, features, p.State(), st.classes,
			p.h.Devices.Slices(), p.compiled())
		if err != nil {
			return nil, framework.Fail(Name, fmt.Errorf("allocating devices: %w", err))
		}
	}
	c.Put(Name, st)
	return nil, nil
}

// findClaim returns the ResourceClaim for an entry of the pod's spec.resourceClaims. If it does not
// exist or cannot be used, it returns the refusal of the pod. Both results are nil if the entry
// needs no claim.
func (p *Plugin) findClaim(pod *v1.Pod, entry *v1.PodResourceClaim) (*resourcev1.ResourceClaim, *framework.Status) {
	name, own, err := resourceclaim.Name(pod, entry)
	switch {
	case errors.Is(err, resourceclaim.ErrClaimNotFound):
		return nil, framework.RefuseForGood(Name,
			fmt.Sprintf("waiting for dynamic resource controller to create the resourceclaim %q of the pod",
				entry.Name))
	case err != nil:
		return nil, framework.RefuseForGood(Name, err.Error())
	case name == nil:
		return nil, nil
	}
	claim, ok := p.h.Devices.DeviceClaim(pod.Namespace, *name)
	switch {
	case !ok:
		return nil, framework.RefuseForGood(Name, fmt.Sprintf("resourceclaim %q not found", *name))
	case claim.DeletionTimestamp != nil:
		return nil, framework.RefuseForGood(Name, fmt.Sprintf("resourceclaim %q is being deleted", *name))
	}
	if own {
		if err := resourceclaim.IsForPod(pod, claim, false); err != nil {
			return nil, framework.RefuseForGood(Name, err.Error())
		}
	}
	return claim, nil
}

// addClaim adds a ResourceClaim of the pod to st, the data of the scheduling attempt. It returns a
// refusal of the pod if no node can fit because of the claim, and otherwise nil.
func (p *Plugin) addClaim(st *state, pod *v1.Pod, claim *resourcev1.ResourceClaim) *framework.Status {
	one := &claimState{claim: claim}
	st.claims = append(st.claims, one)
	a := claim.Status.Allocation
	switch {
	case a == nil && p.Promised(claim.UID):
		return framework.RefuseForGood(Name, fmt.Sprintf("resourceclaim %q is in the process of being allocated",
			claim.Name))
	case a == nil:
		for i := range claim.Spec.Devices.Requests {
			if s := st.checkClass(&claim.Spec.Devices.Requests[i]); s != nil {
				return s
			}
		}
		st.wanting = append(st.wanting, claim)
		return nil
	case !resourceclaim.IsReservedForPod(pod, claim, false) &&
		len(claim.Status.ReservedFor) >= resourcev1.ResourceClaimReservedForMaxSize:
		return framework.RefuseForGood(Name, fmt.Sprintf("resourceclaim %q is in use by the maximum number of pods",
			claim.Name))
	case a.NodeSelector == nil:
		return nil
	}
	var err error
	if one.nodes, err = nodeaffinity.NewNodeSelector(a.NodeSelector); err != nil {
		return framework.Fail(Name, fmt.Errorf("node selector of the devices of claim %s/%s: %w", claim.Namespace,
			claim.Name, err))
	}
	return nil
}

// checkClass returns nil if all DeviceClasses to which the device request r refers exist. Otherwise
// it returns a refusal of the pod with the name of a missing class.
func (st *state) checkClass(r *resourcev1.DeviceRequest) *framework.Status {
	missing := func(request, class string) *framework.Status {
		if _, ok := st.classes.h.Devices.DeviceClass(class); ok {
			return nil
		}
		return framework.RefuseForGood(Name, fmt.Sprintf("request %s: device class %s does not exist", request, class))
	}
	if r.Exactly != nil {
		return missing(r.Name, r.Exactly.DeviceClassName)
	}
	for i := range r.FirstAvailable {
		if s := missing(r.Name+"/"+r.FirstAvailable[i].Name, r.FirstAvailable[i].DeviceClassName); s != nil {
			return s
		}
	}
	return nil
}

// classes gives the device allocator access to the DeviceClasses. It implements
// structured.DeviceClassLister.
type classes struct{ h *framework.Handle }

// List implements structured.DeviceClassLister: it returns all DeviceClasses.
func (c classes) List() ([]*resourcev1.DeviceClass, error) { return c.h.Devices.DeviceClasses(), nil }

// Get implements structured.DeviceClassLister: it returns the DeviceClass with the given name.
func (c classes) Get(name string) (*resourcev1.DeviceClass, error) {
	if class, ok := c.h.Devices.DeviceClass(name); ok {
		return class, nil
	}
	return nil, apierrors.NewNotFound(resourcev1.Resource("deviceclasses"), name)
}

// Filter implements framework.Filter. It refuses a node on which the devices of the pod's allocated
// claims are not available. It also refuses a node on which the allocator finds no devices for the
// other claims. The devices that it finds are stored for Reserve.
func (p *Plugin) Filter(ctx context.Context, c *framework.Cycle, n *framework.NodeInfo) *framework.Status {
	st, ok := c.Get(Name).(*state)
	if !ok {
		return nil
	}
	fits := true
	for _, one := range st.claims {
		if one.nodes != nil && !one.nodes.Match(n.Node) {
			one.unusable, fits = true, false
		}
	}
	if !fits {
		return elsewhere
	}
	if len(st.wanting) == 0 {
		return nil
	}
	if _, ok := st.found[n.Node.Name]; ok { // Filter runs again, with other pods on the node
		return nil
	}
	ctx, cancel := context.WithDeadline(ctx, st.until)
	defer cancel()
	found, err := st.allocator.Allocate(ctx, n.Node, st.wanting)
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return tooLong
	case err != nil && ctx.Err() != nil:
		return framework.Fail(Name, fmt.Errorf("allocating devices: %w", err))
	case err != nil:
		return st.allocatorFailure(err)
	case found == nil:
		return st.explainNode(ctx, n.Node)
	}
	st.found[n.Node.Name] = found
	return nil
}

// allocatorFailure returns the refusal of a node for which the device allocator returned an error,
// for example because a CEL selector cannot be evaluated for a device. Other nodes are still tried.
// After maxErrors errors the refusal has a general message: errors contain device names and would
// make the message about the pod too long.
func (st *state) allocatorFailure(err error) *framework.Status {
	if st.errors++; st.errors > maxErrors {
		return unexplained
	}
	return framework.RefuseForGood(Name, "allocating devices: "+err.Error())
}

// PostFilter implements framework.PostFilter. If Filter refused a node because the devices of a
// claim are not available there, and no other pod uses the claim, it removes the claim's
// allocation. The next attempt can then choose other devices.
func (p *Plugin) PostFilter(ctx context.Context, c *framework.Cycle, _ *framework.FitError) (
	string, *framework.Status,
) {
	st, ok := c.Get(Name).(*state)
	if !ok {
		return "", framework.RefuseForGood(Name)
	}
	for _, one := range st.claims {
		users := one.claim.Status.ReservedFor
		if !one.unusable || len(users) > 1 || len(users) == 1 && users[0].UID != c.Pod.Pod.UID {
			continue
		}
		next := one.claim.DeepCopy()
		next.Status.Allocation, next.Status.ReservedFor = nil, nil
		if _, err := p.h.Devices.UpdateDeviceClaimStatus(ctx, next); err != nil {
			return "", framework.Fail(Name, fmt.Errorf("deallocating the devices of claim %s/%s: %w", next.Namespace,
				next.Name, err))
		}
		return "", framework.RefuseForGood(Name,
			fmt.Sprintf("deallocated the devices of resourceclaim %q, which no fitting node can reach.", next.Name))
	}
	return "", framework.RefuseForGood(Name)
}

// Score implements framework.Score: the score is higher if the devices found on the node satisfy
// earlier alternatives of the device requests (firstAvailable).
func (p *Plugin) Score(_ context.Context, c *framework.Cycle, n *framework.NodeInfo) (int64, *framework.Status) {
	st, ok := c.Get(Name).(*state)
	if !ok {
		return 0, nil
	}
	var sum int64
	for i, a := range st.found[n.Node.Name] {
		sum += preferenceScore(st.wanting[i], &a)
	}
	return sum, nil
}

// preferenceScore returns the score of an allocation for the claim. It is higher if the devices
// satisfy earlier alternatives of the claim's device requests (firstAvailable).
func preferenceScore(claim *resourcev1.ResourceClaim, a *resourcev1.AllocationResult) int64 {
	var sum int64
	for i := range claim.Spec.Devices.Requests {
		r := &claim.Spec.Devices.Requests[i]
		for j := range r.FirstAvailable {
			if hasRequest(a, r.Name+"/"+r.FirstAvailable[j].Name) {
				sum += int64(resourcev1.FirstAvailableDeviceRequestMaxSize - j)
				break
			}
		}
	}
	return sum
}

func hasRequest(a *resourcev1.AllocationResult, request string) bool {
	for i := range a.Devices.Results {
		if a.Devices.Results[i].Request == request {
			return true
		}
	}
	return false
}

// NormalizeScore implements framework.NormalizeScore: the highest score becomes framework.MaxScore.
func (p *Plugin) NormalizeScore(_ context.Context, _ *framework.Cycle, scores []int64) *framework.Status {
	framework.Normalize(scores, false)
	return nil
}

// PreScore implements framework.PreScore: it returns Skip if no device request of the pod has
// alternatives (firstAvailable), because all nodes then have the same score.
func (p *Plugin) PreScore(_ context.Context, c *framework.Cycle, _ []*framework.NodeInfo) *framework.Status {
	st, ok := c.Get(Name).(*state)
	if !ok {
		return framework.SkipStatus
	}
	for _, claim := range st.wanting {
		for i := range claim.Spec.Devices.Requests {
			if len(claim.Spec.Devices.Requests[i].FirstAvailable) > 1 {
				return nil
			}
		}
	}
	return framework.SkipStatus
}

// MayHelp implements framework.Requeue. It returns true for changes of nodes, DeviceClasses and
// ResourceSlices, for the removal of a pod with ResourceClaims, and for a change of one of the
// pod's own claims. For a change of another claim it returns true only if that claim has no
// devices, which may have become free.
func (p *Plugin) MayHelp(e framework.Event, pod *v1.Pod, obj any) bool {
	switch e {
	case framework.NodeAdded, framework.NodeLabels, framework.SliceChanged, framework.DeviceClassChanged:
		return true
	case framework.PodRemoved:
		gone, ok := obj.(*v1.Pod)
		return !ok || len(gone.Spec.ResourceClaims) > 0
	case framework.DeviceClaimChanged:
		c, ok := obj.(*resourcev1.ResourceClaim)
		if !ok || c.Status.Allocation == nil || c.DeletionTimestamp != nil {
			return true
		}
		for name := range resourceclaim.PodClaims(pod) {
			if c.Namespace == pod.Namespace && c.Name == name {
				return true
			}
		}
	}
	return false
}
