package objectlimits

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/apiserver/admission"
	"keelson.dev/keelson/controlplane/apiserver/admission/admissiontest"
)

// hostile is a node that creates objects; its world stores the admitted ones.
type hostile struct {
	t    *testing.T
	name string
	all  *api.Kinds
	w    admissiontest.World
	now  time.Time
	*NodeBounds
}

func newHostile(t *testing.T) *hostile {
	h := &hostile{t: t, name: "a", all: kinds.All(), w: admissiontest.World{}, now: time.Unix(1000, 0)}
	h.NodeBounds = NewNodeBounds(Config{
		Cluster: h.w, Clock: func() time.Time { return h.now },
		NodeOf: func(u api.User) (string, bool) { return strings.CutPrefix(u.Name, api.NodeUserPrefix) },
		PodsOf: func(node string) (out []*corev1.Pod) {
			for _, o := range h.w["pods"] {
				if p := o.(*corev1.Pod); p.Spec.NodeName == node {
					out = append(out, p)
				}
			}
			return out
		},
	})
	return h
}

func (h *hostile) try(a *admission.Attempt) string {
	a.User, a.Request.Namespace = api.User{Name: api.NodeUserPrefix + h.name}, a.Namespace
	err := errors.Join(h.CheckWrite(h.t.Context(), a), h.CheckEvent(h.t.Context(), a))
	if err == nil && a.CreatesObject() {
		h.w[a.Kind.Resource] = append(h.w[a.Kind.Resource], a.Whole)
	}
	return admissiontest.ErrorText(err)
}

func (h *hostile) make(o api.Object) string {
	h.t.Helper()
	o.SetUID(types.UID(o.GetName()))
	return h.try(admissiontest.CreateAttempt(h.all, o))
}

// F32: number and size of the objects of a node are limited, for each node separately. The error
// contains the node, the number, the limit and the remedy. Updates that do not enlarge an object
// are admitted.
func TestNodesMakeSoMany(t *testing.T) {
	mirror := func(name, node string, bytes int) api.Object {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: name, Annotations: map[string]string{
			corev1.MirrorPodAnnotationKey: "x", "text": strings.Repeat("x", bytes)}},
			Spec: corev1.PodSpec{NodeName: node}}
	}
	slice := func(name, node string, bytes int) api.Object {
		return &resourcev1.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: name,
			Annotations: map[string]string{"text": strings.Repeat("x", bytes)}},
			Spec: resourcev1.ResourceSliceSpec{NodeName: &node}}
	}
	request := func(name, node string, bytes int) api.Object {
		return &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: certificatesv1.CertificateSigningRequestSpec{Username: api.NodeUserPrefix + node,
				Request: make([]byte, bytes)}}
	}
	for what, c := range map[string]struct {
		made   func(name, node string, bytes int) api.Object
		bound  func(h *hostile) *nodeBound
		most   int
		remedy string
	}{
		"mirror pods": {mirror, func(h *hostile) *nodeBound {
			return &h.mirrors
		}, 500, "delete some, and remove the static pods"},
		"ResourceSlices": {slice, func(h *hostile) *nodeBound {
			return &h.slices
		}, 256, "delete slices without a driver"},
		"CertificateSigningRequests": {request, func(h *hostile) *nodeBound {
			return &h.requests
		}, 100, "delete some; they expire an hour after a decision"},
	} {
		t.Run(what, func(t *testing.T) {
			h := newHostile(t)
			for n := range c.most {
				if got := h.make(c.made(fmt.Sprint(n), "a", 0)); got != "" {
					t.Fatalf("the %dth: %s", n, got)
				}
			}
			if got := h.make(c.made("more", "a", 0)); !strings.Contains(got,
				fmt.Sprintf("node a has %d %s, the maximum is %d: %s", c.most, what, c.most, c.remedy)) {
				t.Errorf("one more: %q", got)
			}
			if h.name = "b"; h.make(c.made("other", "b", 0)) != "" {
				t.Error("another node may make none")
			}
			h = newHostile(t)
			b := c.bound(h)
			b.bytes = 4000
			first := c.made("first", "a", 3000)
			if got := h.make(first); got != "" {
				t.Fatal(got)
			}
			want := "the maximum is 4000: " + c.remedy
			if got := h.make(c.made("second", "a", 3000)); !strings.HasPrefix(got[strings.Index(got, "node a"):],
				"node a would have "+what+" of 6") || !strings.Contains(got, want) {
				t.Errorf("too long together: %q", got)
			}
			if got := h.make(c.made("short", "a", 10)); got != "" {
				t.Errorf("a short one: %q", got)
			}
		})
	}
	h := newHostile(t)
	h.slices.bytes = 4000
	for _, name := range []string{"1", "2"} {
		if got := h.make(slice(name, "a", 1500)); got != "" {
			t.Fatal(got)
		}
	}
	grown, stored := slice("1", "a", 3000), h.w["resourceslices"][0]
	grown.SetUID(stored.GetUID())
	if got := h.try(admissiontest.UpdateAttempt(h.all, stored, grown)); !strings.Contains(got,
		"node a would have ResourceSlices of") {
		t.Errorf("a slice that grows: %q", got)
	}
	h.slices.bytes = 1000 // created by a release without the limit
	same := slice("1", "a", 1400)
	if got := h.try(admissiontest.UpdateAttempt(h.all, stored, same)); got != "" {
		t.Errorf("a slice that shrinks: %q", got)
	}
	admin := admissiontest.CreateAttempt(h.all, slice("3", "a", 3000))
	admin.User = api.User{Name: "admin"}
	if err := h.CheckWrite(t.Context(), admin); err != nil {
		t.Errorf("who is no node: %v", err)
	}
}

// F32: the size of a pod's status is limited by the pod's containers, and the number of a Node's
// addresses is limited.
func TestNodesSaySoMuch(t *testing.T) {
	h := newHostile(t)
	pod := func(containers, bytes int) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "p", UID: "p",
			Annotations: map[string]string{"of": strings.Repeat("others", 30000)}},
			Spec:   corev1.PodSpec{NodeName: "a", Containers: make([]corev1.Container, containers)},
			Status: corev1.PodStatus{Message: strings.Repeat("x", bytes)}}
	}
	for _, c := range []struct {
		containers, before, now int
		want                    string
	}{
		{1, 0, 79 << 10, ""},
		{1, 0, 81 << 10, "for this pod, the maximum is 81975: shorten messages and conditions"},
		{10, 0, 223 << 10, ""},
		{1, 100 << 10, 99 << 10, ""},
		{1, 100 << 10, 101 << 10, "node a reports a status"},
	} {
		a := admissiontest.UpdateAttempt(h.all, pod(c.containers, c.before), pod(c.containers, c.now))
		a.Facet = "status"
		if got := h.try(a); (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%+v: %q", c, got)
		}
	}
	// The status repeats each mount of the spec.
	mounted, mounts := pod(1, 0), pod(1, 0)
	var says corev1.ContainerStatus
	for n := range 3000 {
		at := fmt.Sprintf("/%0250d", n)
		mounts.Spec.Containers[0].VolumeMounts = append(mounts.Spec.Containers[0].VolumeMounts,
			corev1.VolumeMount{Name: "v", MountPath: at})
		says.VolumeMounts = append(says.VolumeMounts, corev1.VolumeMountStatus{Name: "v", MountPath: at})
	}
	mounted.Status.ContainerStatuses = []corev1.ContainerStatus{says}
	mounted.Spec = mounts.Spec
	if got := h.try(admissiontest.UpdateAttempt(h.all, mounts, mounted)); got != "" {
		t.Errorf("many mounts: %q", got)
	}
	managed, before := pod(1, 0), pod(1, 0)
	managed.ManagedFields = []metav1.ManagedFieldsEntry{{Subresource: "status",
		FieldsV1: &metav1.FieldsV1{Raw: make([]byte, 90<<10)}}}
	if got := h.try(admissiontest.UpdateAttempt(h.all, before, managed)); !strings.Contains(got,
		"node a reports a status") {
		t.Errorf("fields with many managers: %q", got)
	}

	node := func(addresses ...string) *corev1.Node {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}}
		for _, at := range addresses {
			n.Status.Addresses = append(n.Status.Addresses,
				corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: at})
		}
		return n
	}
	var many []string
	for n := range 33 {
		many = append(many, fmt.Sprint("192.0.2.", n))
	}
	for _, c := range []struct {
		before, now []string
		want        string
	}{
		{nil, many[:32], ""},
		{nil, many, "node a has 33 addresses in status.addresses, the maximum is 32: remove unreachable addresses"},
		{append(many, "192.0.2.99"), many, ""},
		{nil, []string{"192.0.2.1", strings.Repeat("x", 254)},
			"status.addresses[1] of node a has 254 bytes, the maximum is 253"},
	} {
		if got := h.try(admissiontest.UpdateAttempt(h.all, node(c.before...), node(c.now...))); (got == "") !=
			(c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%d addresses: %q", len(c.now), got)
		}
	}
}

// F32: the events of a node are limited across all namespaces while they are kept. An updated event
// is kept, and counted, longer.
func TestEventsOfANodeAreBounded(t *testing.T) {
	h := newHostile(t)
	h.maxEvents, h.maxEventBytes = 4, 5000
	event := func(n, bytes int) *corev1.Event {
		e := anEvent(n)
		e.Namespace, e.Message = fmt.Sprint("ns", n), strings.Repeat("x", bytes)
		return e
	}
	again := func(n, bytes int) string {
		return h.try(admissiontest.UpdateAttempt(h.all, event(n, 0), event(n, bytes)))
	}
	for n := range 4 {
		if got := h.make(event(n, 100)); got != "" {
			t.Fatal(got)
		}
	}
	const full = "node a has written 4 events within an hour, which is the maximum: write fewer " +
		"events; events expire an hour after their last write"
	if got := h.make(event(5, 0)); !strings.Contains(got, full) {
		t.Errorf("one more: %q", got)
	}
	if got := again(6, 0); !strings.Contains(got, full) {
		t.Errorf("one that somebody else wrote: %q", got)
	}
	if got := again(1, 100); got != "" {
		t.Errorf("its own again: %q", got)
	}
	if got := again(1, 5000); !strings.Contains(got, "node a has written events of 5000 bytes within an hour") {
		t.Errorf("a long one: %q", got)
	}
	h.now = h.now.Add(eventLifetime - time.Minute)
	if got := again(0, 100) + again(1, 100); got != "" { // they are kept longer
		t.Error(got)
	}
	h.now = h.now.Add(time.Minute)
	if got := h.make(event(7, 0)) + h.make(event(8, 0)); got != "" {
		t.Errorf("when two have gone: %q", got)
	}
	if got := h.make(event(9, 0)); !strings.Contains(got, full) {
		t.Errorf("when four are there again: %q", got)
	}
	if h.name = "b"; h.make(event(10, 0)) != "" {
		t.Error("another node may write none")
	}
	h.now = h.now.Add(2 * eventLifetime)
	dry := admissiontest.CreateAttempt(h.all, event(11, 0))
	dry.DryRun = true
	if got := h.try(dry); got != "" || len(h.events) != 0 {
		t.Errorf("%d nodes are remembered, of which none has an event: %q", len(h.events), got)
	}
}
