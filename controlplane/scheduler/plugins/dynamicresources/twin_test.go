package dynamicresources

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

const driver = "gpu.example.com"

func of[T any](v T) *T { return &v }

// shop is a cluster of nodes with devices, whose claims are told of late.
type shop struct {
	nodes   []*framework.NodeInfo
	classes map[string]*resourcev1.DeviceClass
	slices  []*resourcev1.ResourceSlice
	claims  map[string]*resourcev1.ResourceClaim // as stored
	cached  map[string]*resourcev1.ResourceClaim // as told
	plugin  *Plugin
	fail    func(c *resourcev1.ResourceClaim) error // a fault on the way of a status
	version int
}

func newShop() *shop {
	s := &shop{classes: map[string]*resourcev1.DeviceClass{}, claims: map[string]*resourcev1.ResourceClaim{},
		cached: map[string]*resourcev1.ResourceClaim{}}
	for name, expression := range map[string]string{"any": "", "a": `device.attributes["` + driver + `"].kind == "a"`} {
		class := &resourcev1.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if expression != "" {
			class.Spec.Selectors = []resourcev1.DeviceSelector{
				{CEL: &resourcev1.CELDeviceSelector{Expression: expression}}}
		}
		s.classes[name] = class
	}
	write := func(c *resourcev1.ResourceClaim, status bool) (*resourcev1.ResourceClaim, error) {
		have := s.claims[c.Name]
		switch {
		case have == nil:
			return nil, apierrors.NewNotFound(resourcev1.Resource("resourceclaims"), c.Name)
		case have.ResourceVersion != c.ResourceVersion:
			return nil, apierrors.NewConflict(resourcev1.Resource("resourceclaims"), c.Name, nil)
		}
		if status && s.fail != nil {
			if err := s.fail(c); err != nil {
				return nil, err
			}
		}
		return s.put(c), nil
	}
	h := &framework.Handle{Devices: framework.Devices{
		DeviceClaim: func(_, name string) (*resourcev1.ResourceClaim, bool) { c, ok := s.cached[name]; return c, ok },
		DeviceClass: func(name string) (*resourcev1.DeviceClass, bool) { c, ok := s.classes[name]; return c, ok },
		Slices:      func() []*resourcev1.ResourceSlice { return s.slices },
		DeviceClaimNow: func(_ context.Context, _, name string) (*resourcev1.ResourceClaim, error) {
			if c := s.claims[name]; c != nil {
				return c, nil
			}
			return nil, apierrors.NewNotFound(resourcev1.Resource("resourceclaims"), name)
		},
		UpdateDeviceClaim: func(_ context.Context, c *resourcev1.ResourceClaim) (*resourcev1.ResourceClaim, error) {
			return write(c, false)
		},
		UpdateDeviceClaimStatus: func(_ context.Context,
			c *resourcev1.ResourceClaim) (*resourcev1.ResourceClaim, error) {
			return write(c, true)
		},
	}}
	s.plugin = New(h, NewLedger(), time.Hour, DefaultPatience)
	s.plugin.explains = time.Hour // the machine may be busy
	return s
}

func (s *shop) put(c *resourcev1.ResourceClaim) *resourcev1.ResourceClaim {
	s.version++
	c = c.DeepCopy()
	c.ResourceVersion = fmt.Sprint(s.version)
	s.claims[c.Name] = c
	return c
}

// tell brings the cache up to date with one claim.
func (s *shop) tell(name string) {
	c, ok := s.claims[name]
	if !ok {
		if gone := s.cached[name]; gone != nil {
			delete(s.cached, name)
			s.plugin.Observe(gone, true)
		}
		return
	}
	s.cached[name] = c
	s.plugin.Observe(c, false)
}

func (s *shop) node(name string, devices ...resourcev1.Device) {
	info := &framework.NodeInfo{}
	info.SetNode(&v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{v1.LabelHostname: name}}})
	s.nodes = append(s.nodes, info)
	if len(devices) > 0 {
		s.slices = append(s.slices, &resourcev1.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: name + "-gpu"},
			Spec: resourcev1.ResourceSliceSpec{
				Driver: driver, NodeName: &name, Devices: devices,
				Pool: resourcev1.ResourcePool{Name: name, Generation: 1, ResourceSliceCount: 1}}})
	}
}

func device(name, kind string, numa int64, taints ...resourcev1.DeviceTaint) resourcev1.Device {
	d := resourcev1.Device{Name: name, Taints: taints,
		Attributes: map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{"kind": {StringValue: &kind}}}
	if numa >= 0 {
		d.Attributes["numa"] = resourcev1.DeviceAttribute{IntValue: &numa}
	}
	return d
}

// cycle is an attempt at a pod that claims these.
func (s *shop) cycle(pod string, claims ...string) *framework.Cycle {
	p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: pod, UID: types.UID(pod)}}
	for _, c := range claims {
		p.Spec.ResourceClaims = append(p.Spec.ResourceClaims, v1.PodResourceClaim{Name: c, ResourceClaimName: &c})
	}
	return framework.NewCycle(framework.NewPodInfo(p), framework.NewSnapshot(s.nodes...))
}

func (s *shop) claim(name string, spec resourcev1.DeviceClaim) {
	s.put(&resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID(name)},
		Spec: resourcev1.ResourceClaimSpec{Devices: spec}})
	s.tell(name)
}

func randomClaim(r *rand.Rand) resourcev1.DeviceClaim {
	var spec resourcev1.DeviceClaim
	all := false
	class := func() string { return []string{"any", "a"}[r.IntN(2)] }
	mode := func() (resourcev1.DeviceAllocationMode, int64) {
		if r.IntN(6) == 0 {
			all = true
			return resourcev1.DeviceAllocationModeAll, 0
		}
		return resourcev1.DeviceAllocationModeExactCount, 1 + r.Int64N(2)
	}
	tolerations := func() []resourcev1.DeviceToleration {
		if r.IntN(2) == 0 {
			return nil
		}
		return []resourcev1.DeviceToleration{{Key: "sick", Operator: resourcev1.DeviceTolerationOpExists}}
	}
	for i := range 1 + r.IntN(2) {
		req := resourcev1.DeviceRequest{Name: fmt.Sprint("r", i)}
		if r.IntN(4) == 0 {
			for j := range 2 {
				sub := resourcev1.DeviceSubRequest{Name: fmt.Sprint("s", j), DeviceClassName: class(),
					Tolerations: tolerations()}
				sub.AllocationMode, sub.Count = mode()
				req.FirstAvailable = append(req.FirstAvailable, sub)
			}
		} else {
			e := &resourcev1.ExactDeviceRequest{DeviceClassName: class(), Tolerations: tolerations()}
			e.AllocationMode, e.Count = mode()
			if r.IntN(6) == 0 {
				e.AdminAccess = of(true)
			}
			if r.IntN(4) == 0 {
				e.Selectors = []resourcev1.DeviceSelector{
					{CEL: &resourcev1.CELDeviceSelector{Expression: `device.attributes["` + driver + `"].kind != "a"`}}}
			}
			req.Exactly = e
		}
		spec.Requests = append(spec.Requests, req)
	}
	if !all && r.IntN(3) == 0 {
		// the allocator fails where all devices are wanted and break a constraint, alternatives or
		// not
		c := resourcev1.DeviceConstraint{MatchAttribute: of(resourcev1.FullyQualifiedName(driver + "/numa"))}
		if r.IntN(2) == 0 {
			c.Requests = []string{"r0"}
		}
		spec.Constraints = append(spec.Constraints, c)
	}
	return spec
}

// The twin: what fits is tried out.

// wish is a request, or one of its alternatives.
type wish struct {
	class, request string
	other          bool // of another kind than a
	all, admin     bool
	count          int
	tolerant       bool
}

func wishes(r *resourcev1.DeviceRequest) []wish {
	if e := r.Exactly; e != nil {
		return []wish{{e.DeviceClassName, r.Name, len(e.Selectors) > 0,
			e.AllocationMode == resourcev1.DeviceAllocationModeAll,
			e.AdminAccess != nil, int(e.Count), len(e.Tolerations) > 0}}
	}
	var out []wish
	for _, s := range r.FirstAvailable {
		out = append(out, wish{class: s.DeviceClassName, request: r.Name,
			all:   s.AllocationMode == resourcev1.DeviceAllocationModeAll,
			count: int(s.Count), tolerant: len(s.Tolerations) > 0})
	}
	return out
}

// trial is a search on one node.
type trial struct {
	devices []resourcev1.Device
	taken   map[string]bool // by others, and by what was chosen so far
}

func (t *trial) fits(claims []*resourcev1.ResourceClaim) bool {
	if len(claims) == 0 {
		return true
	}
	return t.requests(claims, 0, map[string][]resourcev1.Device{}, map[string]bool{})
}

// requests goes on with a request of the first claim. got is what that has by now, by request; own are its devices.
func (t *trial) requests(
	claims []*resourcev1.ResourceClaim, i int, got map[string][]resourcev1.Device, own map[string]bool,
) bool {
	spec := &claims[0].Spec.Devices
	if i == len(spec.Requests) {
		return matched(spec, got) && t.fits(claims[1:])
	}
	for _, w := range wishes(&spec.Requests[i]) {
		var right []resourcev1.Device
		for _, d := range t.devices {
			a := *d.Attributes["kind"].StringValue == "a"
			if (w.class == "any" || a) && (!w.other || !a) {
				right = append(right, d)
			}
		}
		want := w.count
		if w.all {
			if want = len(right); want == 0 {
				continue
			}
		}
		if t.pick(w, right, want, nil, func(chosen []resourcev1.Device) bool {
			got[w.request] = chosen
			defer delete(got, w.request)
			return t.requests(claims, i+1, got, own)
		}, own) {
			return true
		}
	}
	return false
}

// pick tries all ways to choose so many of the devices.
func (t *trial) pick(
	w wish, from []resourcev1.Device, n int, chosen []resourcev1.Device, then func([]resourcev1.Device) bool,
	own map[string]bool,
) bool {
	if n == 0 {
		return then(slices.Clone(chosen))
	}
	for i, d := range from {
		if len(d.Taints) > 0 && !w.tolerant || !w.admin && t.taken[d.Name] || own[d.Name] {
			continue
		}
		own[d.Name] = true
		was := t.taken[d.Name]
		t.taken[d.Name] = true // within one attempt also by an administrator's request
		done := t.pick(w, from[i+1:], n-1, append(chosen, d), then, own)
		delete(own, d.Name)
		t.taken[d.Name] = was
		if done {
			return true
		}
	}
	return false
}

func matched(spec *resourcev1.DeviceClaim, got map[string][]resourcev1.Device) bool {
	for _, c := range spec.Constraints {
		value := int64(-1)
		for request, devices := range got {
			if len(c.Requests) > 0 && !slices.Contains(c.Requests, request) {
				continue
			}
			for _, d := range devices {
				a, ok := d.Attributes["numa"]
				if !ok || value >= 0 && *a.IntValue != value {
					return false
				}
				value = *a.IntValue
			}
		}
	}
	return true
}

// holders are the claims that have a device for themselves, by pool/device.
func (s *shop) holders(t *testing.T, seed uint64) map[string]string {
	out := map[string]string{}
	for name, c := range s.claims {
		if c.Status.Allocation == nil {
			continue
		}
		for _, r := range c.Status.Allocation.Devices.Results {
			if r.AdminAccess != nil && *r.AdminAccess {
				continue
			}
			key := r.Pool + "/" + r.Device
			if other := out[key]; other != "" {
				t.Fatalf("seed %d: device %s was given to claims %s and %s", seed, key, other, name)
			}
			out[key] = name
		}
	}
	return out
}

// A pod fits a node exactly when trying everything out finds devices for its claims there; what is chosen is what was
// asked for; and no device is given away twice, however late the claims are told of and whatever fails.
func TestDevicesAgainstTwin(t *testing.T) {
	fitted, refused := 0, 0
	for seed := range uint64(400) {
		r := rand.New(rand.NewPCG(seed, 1))
		s := newShop()
		for i := range 1 + r.IntN(3) {
			var devices []resourcev1.Device
			for j := range r.IntN(5) {
				d := device(fmt.Sprint("d", j), []string{"a", "b"}[r.IntN(2)], r.Int64N(3)-1)
				if r.IntN(5) == 0 {
					d.Taints = []resourcev1.DeviceTaint{{Key: "sick", Effect: resourcev1.DeviceTaintEffectNoSchedule}}
				}
				devices = append(devices, d)
			}
			s.node(fmt.Sprint("n", i), devices...)
		}
		open := map[string]*framework.Cycle{} // pods between Reserve and the end of PreBind, by claims
		var order []string
		for step := range 14 {
			for name := range s.claims { // some are told of now
				if r.IntN(2) == 0 {
					s.tell(name)
				}
			}
			switch {
			case r.IntN(3) == 0 && len(order) > 0: // a pod is bound, or is not
				pod := order[0]
				order = order[1:]
				s.finish(t, r, open[pod])
			case r.IntN(5) == 0: // devices are given back
				for name, c := range s.claims {
					if c.Status.Allocation != nil {
						next := c.DeepCopy()
						next.Status = resourcev1.ResourceClaimStatus{}
						s.put(next)
						s.tell(name)
						break
					}
				}
			default:
				pod := fmt.Sprint("p", step)
				c, ok := s.attempt(t, seed, r, pod)
				if ok {
					open[pod] = c
					order = append(order, pod)
					fitted++
				} else {
					refused++
				}
			}
			s.holders(t, seed)
		}
	}
	if fitted < 500 || refused < 500 {
		t.Errorf("%d fitted, %d were refused: the test looks at one side only", fitted, refused)
	}
}

// attempt places a new pod with new claims and compares each node with the twin.
func (s *shop) attempt(t *testing.T, seed uint64, r *rand.Rand, pod string) (*framework.Cycle, bool) {
	t.Helper()
	ctx := context.Background()
	var names []string
	for i := range 1 + r.IntN(2) {
		name := fmt.Sprint(pod, "-", i)
		s.claim(name, randomClaim(r))
		names = append(names, name)
	}
	c := s.cycle(pod, names...)
	if _, st := s.plugin.PreFilter(ctx, c); !st.OK() {
		t.Fatalf("seed %d: pod %s: %s", seed, pod, st.Message())
	}
	given := s.given()
	var fit []string
	for _, n := range s.nodes {
		tr := &trial{taken: map[string]bool{}}
		for _, slice := range s.slices {
			if *slice.Spec.NodeName == n.Node.Name {
				tr.devices = slice.Spec.Devices
			}
		}
		for _, d := range tr.devices {
			tr.taken[d.Name] = given[n.Node.Name+"/"+d.Name]
		}
		var claims []*resourcev1.ResourceClaim
		for _, name := range names {
			claims = append(claims, s.cached[name])
		}
		want := tr.fits(claims)
		st := s.plugin.Filter(ctx, c, n)
		if st.OK() != want || !want && !strings.HasPrefix(st.Message(), cannot+": ") {
			t.Fatalf("seed %d: pod %s on %s: %v %q, the twin says %v\nclaims %+v\ndevices %+v\ntaken %v", seed, pod,
				n.Node.Name, st.OK(), st.Message(), want,
				claims, tr.devices, tr.taken)
		}
		if want {
			fit = append(fit, n.Node.Name)
		}
	}
	if len(fit) == 0 {
		return nil, false
	}
	if st := s.plugin.Reserve(ctx, c, fit[r.IntN(len(fit))]); !st.OK() {
		t.Fatalf("seed %d: %s", seed, st.Message())
	}
	return c, true
}

// given are the devices that the plugin has to believe to be given away, by pool/device: what claims were told to have,
// and what was chosen and is not known to be taken back.
func (s *shop) given() map[string]bool {
	out := map[string]bool{}
	s.plugin.mu.Lock()
	defer s.plugin.mu.Unlock()
	note := func(a *resourcev1.AllocationResult) {
		for _, r := range a.Devices.Results {
			if r.AdminAccess == nil || !*r.AdminAccess {
				out[r.Pool+"/"+r.Device] = true
			}
		}
	}
	for _, c := range s.cached {
		if c.Status.Allocation != nil {
			note(c.Status.Allocation)
		}
	}
	for _, p := range s.plugin.promised {
		note(p.allocation)
	}
	return out
}

// finish ends an attempt well or badly.
func (s *shop) finish(t *testing.T, r *rand.Rand, c *framework.Cycle) {
	t.Helper()
	ctx := context.Background()
	lost := apierrors.NewTimeoutError("lost", 0)
	switch r.IntN(4) {
	case 0: // refused before anything was written
		s.plugin.Unreserve(ctx, c, "")
		return
	case 1: // the answer to a write is lost
		s.fail = func(next *resourcev1.ResourceClaim) error { s.put(next); return lost }
	case 2: // a write is
		s.fail = func(*resourcev1.ResourceClaim) error { return lost }
	}
	st := s.plugin.PreBind(ctx, c, "")
	failing := s.fail != nil
	s.fail = nil
	if st.OK() == failing {
		t.Fatalf("PreBind: %v %s", st.OK(), st.Message())
	}
	if failing || r.IntN(4) == 0 { // or the binding fails
		s.plugin.Unreserve(ctx, c, "")
		return
	}
	for _, one := range c.Get(Name).(*state).claims {
		now := s.claims[one.claim.Name]
		if now.Status.Allocation == nil || len(now.Status.ReservedFor) != 1 ||
			now.Status.ReservedFor[0].UID != c.Pod.Pod.UID || !slices.Contains(now.Finalizers, resourcev1.Finalizer) {
			t.Fatalf("a bound pod's claim: %+v", now)
		}
	}
}
