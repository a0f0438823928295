package why

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/controlplane/api/balancer"
)

func TestServices(t *testing.T) {
	service := func(selector map[string]string, target intstr.IntOrString) *corev1.Service {
		return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "front", Namespace: "default", CreationTimestamp: ago(0)},
			Spec: corev1.ServiceSpec{Selector: selector, Ports: []corev1.ServicePort{{Port: 80, TargetPort: target}}}}
	}
	app := func(value string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Labels["app"] = value
			p.Spec.Containers[0].Ports = []corev1.ContainerPort{{Name: "http", ContainerPort: 8080}}
		}
	}
	http := intstr.FromString("http")
	yes, no, w1 := true, false, "w1"
	part := func(change ...func(*discoveryv1.Endpoint)) discoveryv1.EndpointSlice {
		l := discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: "front-x", Namespace: "default", CreationTimestamp: ago(0),
			Labels: map[string]string{discoveryv1.LabelServiceName: "front"}}}
		for _, c := range change {
			e := discoveryv1.Endpoint{Addresses: []string{"10.0.0.1"}, NodeName: &w1, Conditions: discoveryv1.EndpointConditions{Ready: &yes},
				TargetRef: &corev1.ObjectReference{Kind: "Pod", Name: "nr-1"}}
			c(&e)
			l.Endpoints = append(l.Endpoints, e)
		}
		return l
	}
	asIs := func(*discoveryv1.Endpoint) {}
	notReady := func(e *discoveryv1.Endpoint) { e.Conditions.Ready = &no }
	going := func(e *discoveryv1.Endpoint) { e.Conditions.Ready, e.Conditions.Terminating = &no, &yes }
	zoned := func(e *discoveryv1.Endpoint) {
		e.Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "a"}}}
	}
	good := World{Slices: []discoveryv1.EndpointSlice{part(asIs)}, Nodes: []corev1.Node{node("w1")}, Pods: []corev1.Pod{*pod("nr-1", app("nr"), on("w1"), ready(corev1.ConditionTrue))}}
	bad := good
	bad.Pods = []corev1.Pod{*pod("nr-1", app("nr"), on("w1"), waits("CreateContainerConfigError", `secret "key" not found`)),
		*pod("nr-2", app("nr"), on("w1"), waits("CreateContainerConfigError", `secret "key" not found`))}
	outside := service(map[string]string{"app": "nr"}, http)
	outside.Spec.Type = corev1.ServiceTypeLoadBalancer
	told := func(status metav1.ConditionStatus, reason, message string, ingress ...corev1.LoadBalancerIngress) *corev1.Service {
		s := outside.DeepCopy()
		s.Status.LoadBalancer.Ingress = ingress
		s.Status.Conditions = []metav1.Condition{{Type: balancer.Condition, Status: status, Reason: reason, Message: message, LastTransitionTime: ago(0)}}
		return s
	}
	one := corev1.LoadBalancerIngress{IP: "192.0.2.1"}
	answered := told(metav1.ConditionTrue, balancer.ReasonReady, "", one)
	answered.Annotations = map[string]string{balancer.AnnouncedBy: "w1"}
	with := func(change func(w *World)) World { w := good; change(&w); return w }
	zone := func(z string) func(*corev1.Node) {
		return func(n *corev1.Node) { n.Labels[corev1.LabelTopologyZone] = z }
	}
	local := service(map[string]string{"app": "nr"}, http)
	policy := corev1.ServiceInternalTrafficPolicyLocal
	local.Spec.InternalTrafficPolicy = &policy
	ofNobody, ended, mixed := part(asIs), part(notReady, going), part(asIs, going)
	ofNobody.Labels = nil
	known := World{Services: []corev1.Service{*service(nil, http)}}
	empty := part()
	transcript(t, "services", []subject{
		{"a pool that is used up", good, told(metav1.ConditionFalse, balancer.ReasonFull, "no IPv4 address is free in pool a: add addresses to ConfigMap kube-system/load-balancer-pools")},
		{"an address of no pool", good, told(metav1.ConditionTrue, balancer.ReasonOutside, "address 192.0.2.1 is in no pool any more", one)},
		{"nobody answers for its address", good, told(metav1.ConditionTrue, balancer.ReasonReady, "", one)},
		{"w1 answers for its address", good, answered},
		{"no slices", with(func(w *World) { w.Slices = nil }), service(map[string]string{"app": "nr"}, http)},
		{"slices with no ready endpoint", with(func(w *World) { w.Slices = []discoveryv1.EndpointSlice{part(notReady), part()} }), service(map[string]string{"app": "nr"}, http)},
		{"slices that may not be read", with(func(w *World) { w.Slices, w.Unread = nil, []string{Slices} }), service(map[string]string{"app": "nr"}, http)},
		{"no selector and empty slices", World{Slices: []discoveryv1.EndpointSlice{part()}}, service(nil, http)},
		{"hints that leave a zone out", with(func(w *World) {
			w.Slices = []discoveryv1.EndpointSlice{part(zoned)}
			w.Nodes = []corev1.Node{node("w1", zone("a")), node("w2", zone("b")), node("w3")}
		}), service(map[string]string{"app": "nr"}, http)},
		{"hints for every zone", with(func(w *World) {
			w.Slices, w.Nodes = []discoveryv1.EndpointSlice{part(zoned)}, []corev1.Node{node("w1", zone("a"))}
		}), service(map[string]string{"app": "nr"}, http)},
		{"Local, and a node without an endpoint", with(func(w *World) { w.Nodes = []corev1.Node{node("w1"), node("w2")} }), local},
		{"a slice of no Service", known, &ofNobody},
		{"a slice of a Service that is gone", World{}, &empty},
		{"a slice without endpoints", known, &empty},
		{"a slice without a ready endpoint", known, &ended},
		{"a slice that is well", known, &mixed},
		{"a letter too many", good, service(map[string]string{"app": "nrr"}, http)},
		{"nothing like it", good, service(map[string]string{"tier": "backend"}, http)},
		{"no pods", World{}, service(map[string]string{"app": "nr"}, http)},
		{"none is Ready", bad, service(map[string]string{"app": "nr"}, http)},
		{"a port by a name that is not there", good, service(map[string]string{"app": "nr"}, intstr.FromString("web"))},
		{"a port by a number that is not there", good, service(map[string]string{"app": "nr"}, intstr.FromInt32(80))},
		{"no load balancer", good, outside},
		{"all is well", good, service(map[string]string{"app": "nr"}, http)},
		{"no selector", World{}, service(nil, http)},
		{"no selector, and somebody's slice", World{Slices: []discoveryv1.EndpointSlice{part(asIs)}}, service(nil, http)},
	})
}

// Of two words the nearer is chosen; one that has nothing in common with it is not.
func TestNearestWord(t *testing.T) {
	for word, want := range map[string]string{"app=nrr": "app=nr", "app=rn": "app=nr", "tier=backend": "", "role=frnot": "role=front"} {
		if got := nearestWord(word, []string{"role=front", "app=nr", "x"}); got != want {
			t.Errorf("%s: %q, want %q", word, got, want)
		}
	}
}
