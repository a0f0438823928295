package why

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/controlplane/api/balancer"
)

func servicesService(selector map[string]string, target intstr.IntOrString) *corev1.Service {
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "front", Namespace: "default",
		CreationTimestamp: ago(0)},
		Spec: corev1.ServiceSpec{Selector: selector, Ports: []corev1.ServicePort{{Port: 80, TargetPort: target}}}}
}

func servicesApp(value string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Labels["app"] = value
		p.Spec.Containers[0].Ports = []corev1.ContainerPort{{Name: "http", ContainerPort: 8080}}
	}
}

var servicesHttp = intstr.FromString("http")

var servicesYes, servicesNo, servicesW1 = true, false, "w1"

func servicesPart(change ...func(*discoveryv1.Endpoint)) discoveryv1.EndpointSlice {
	l := discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: "front-x", Namespace: "default",
		CreationTimestamp: ago(0),
		Labels:            map[string]string{discoveryv1.LabelServiceName: "front"}}}
	for _, c := range change {
		e := discoveryv1.Endpoint{Addresses: []string{"10.0.0.1"}, NodeName: &servicesW1,
			Conditions: discoveryv1.EndpointConditions{Ready: &servicesYes},
			TargetRef:  &corev1.ObjectReference{Kind: "Pod", Name: "nr-1"}}
		c(&e)
		l.Endpoints = append(l.Endpoints, e)
	}
	return l
}

func servicesAsIs(*discoveryv1.Endpoint) {}

func servicesNotReady(e *discoveryv1.Endpoint) { e.Conditions.Ready = &servicesNo }

func servicesGoing(e *discoveryv1.Endpoint) {
	e.Conditions.Ready, e.Conditions.Terminating = &servicesNo, &servicesYes
}

func servicesZoned(e *discoveryv1.Endpoint) {
	e.Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "a"}}}
}

var servicesGood = World{Route: RouteObjects{Slices: []discoveryv1.EndpointSlice{servicesPart(servicesAsIs)}},
	Nodes: []corev1.Node{node("w1")},
	Pods:  []corev1.Pod{*pod("nr-1", servicesApp("nr"), on("w1"), ready(corev1.ConditionTrue))}}

var servicesBad = servicesWith(func(w *World) {
	message := `secret "key" not found`
	w.Pods = []corev1.Pod{
		*pod("nr-1", servicesApp("nr"), on("w1"), waits("CreateContainerConfigError", message)),
		*pod("nr-2", servicesApp("nr"), on("w1"), waits("CreateContainerConfigError", message))}
})

var servicesOutside = func() *corev1.Service {
	s := servicesService(map[string]string{"app": "nr"}, servicesHttp)
	s.Spec.Type = corev1.ServiceTypeLoadBalancer
	return s
}()

func servicesTold(status metav1.ConditionStatus, reason, message string,
	ingress ...corev1.LoadBalancerIngress) *corev1.Service {
	s := servicesOutside.DeepCopy()
	s.Status.LoadBalancer.Ingress = ingress
	s.Status.Conditions = []metav1.Condition{{Type: balancer.Condition, Status: status, Reason: reason,
		Message: message, LastTransitionTime: ago(0)}}
	return s
}

var servicesOne = corev1.LoadBalancerIngress{IP: "192.0.2.1"}

var servicesAnswered = func() *corev1.Service {
	s := servicesTold(metav1.ConditionTrue, balancer.ReasonReady, "", servicesOne)
	s.Annotations = map[string]string{balancer.AnnouncedBy: "w1"}
	return s
}()

func servicesWith(change func(w *World)) World { w := servicesGood; change(&w); return w }

func servicesZone(z string) func(*corev1.Node) {
	return func(n *corev1.Node) { n.Labels[corev1.LabelTopologyZone] = z }
}

var servicesLocal = func() *corev1.Service {
	s := servicesService(map[string]string{"app": "nr"}, servicesHttp)
	s.Spec.InternalTrafficPolicy = new(corev1.ServiceInternalTrafficPolicyLocal)
	return s
}()

var (
	servicesEnded = servicesPart(servicesNotReady, servicesGoing)
	servicesMixed = servicesPart(servicesAsIs, servicesGoing)
)

var servicesOfNobody = func() discoveryv1.EndpointSlice {
	s := servicesPart(servicesAsIs)
	s.Labels = nil
	return s
}()

var servicesKnown = World{Route: RouteObjects{Services: []corev1.Service{*servicesService(nil, servicesHttp)}}}

var servicesEmpty = servicesPart()

// servicesCases are the cases of TestServices.
var servicesCases = []subject{
	{"a pool that is used up", servicesGood, servicesTold(metav1.ConditionFalse, balancer.ReasonFull,
		"no IPv4 address is free in pool a: add addresses to ConfigMap kube-system/load-balancer-pools")},
	{"an address of no pool", servicesGood, servicesTold(metav1.ConditionTrue, balancer.ReasonOutside,
		"address 192.0.2.1 is in no pool any more", servicesOne)},
	{"nobody answers for its address", servicesGood,
		servicesTold(metav1.ConditionTrue, balancer.ReasonReady, "", servicesOne)},
	{"w1 answers for its address", servicesGood, servicesAnswered},
	{"no slices", servicesWith(func(w *World) {
		w.Route.Slices = nil
	}), servicesService(map[string]string{"app": "nr"}, servicesHttp)},
	{"slices with no ready endpoint", servicesWith(func(w *World) {
		w.Route.Slices = []discoveryv1.EndpointSlice{servicesPart(servicesNotReady),
			servicesPart()}
	}), servicesService(map[string]string{"app": "nr"}, servicesHttp)},
	{"slices that may not be read", servicesWith(func(w *World) {
		w.Route.Slices, w.Unread = nil,
			[]string{Slices}
	}), servicesService(map[string]string{"app": "nr"}, servicesHttp)},
	{"no selector and empty slices", World{Route: RouteObjects{Slices: []discoveryv1.EndpointSlice{servicesPart()}}},
		servicesService(nil, servicesHttp)},
	{"hints that leave a zone out", servicesWith(func(w *World) {
		w.Route.Slices = []discoveryv1.EndpointSlice{servicesPart(servicesZoned)}
		w.Nodes = []corev1.Node{node("w1", servicesZone("a")), node("w2", servicesZone("b")), node("w3")}
	}), servicesService(map[string]string{"app": "nr"}, servicesHttp)},
	{"hints for every zone", servicesWith(func(w *World) {
		w.Route.Slices, w.Nodes = []discoveryv1.EndpointSlice{servicesPart(servicesZoned)},
			[]corev1.Node{node("w1", servicesZone("a"))}
	}), servicesService(map[string]string{"app": "nr"}, servicesHttp)},
	{"Local, and a node without an endpoint", servicesWith(func(w *World) {
		w.Nodes = []corev1.Node{node("w1"),
			node("w2")}
	}), servicesLocal},
	{"a slice of no Service", servicesKnown, &servicesOfNobody},
	{"a slice of a Service that is gone", World{}, &servicesEmpty},
	{"a slice without endpoints", servicesKnown, &servicesEmpty},
	{"a slice without a ready endpoint", servicesKnown, &servicesEnded},
	{"a slice that is well", servicesKnown, &servicesMixed},
	{"a letter too many", servicesGood, servicesService(map[string]string{"app": "nrr"}, servicesHttp)},
	{"nothing like it", servicesGood, servicesService(map[string]string{"tier": "backend"}, servicesHttp)},
	{"no pods", World{}, servicesService(map[string]string{"app": "nr"}, servicesHttp)},
	{"none is Ready", servicesBad, servicesService(map[string]string{"app": "nr"}, servicesHttp)},
	{"a port by a name that is not there", servicesGood,
		servicesService(map[string]string{"app": "nr"}, intstr.FromString("web"))},
	{"a port by a number that is not there", servicesGood,
		servicesService(map[string]string{"app": "nr"}, intstr.FromInt32(80))},
	{"no load balancer", servicesGood, servicesOutside},
	{"all is well", servicesGood, servicesService(map[string]string{"app": "nr"}, servicesHttp)},
	{"no selector", World{}, servicesService(nil, servicesHttp)},
	{"no selector, and somebody's slice",
		World{Route: RouteObjects{Slices: []discoveryv1.EndpointSlice{servicesPart(servicesAsIs)}}},
		servicesService(nil, servicesHttp)},
}

func TestServices(t *testing.T) {
	transcript(t, "services", servicesCases)
}

// Of two words the nearer is chosen; one that has nothing in common with it is not.
func TestNearestWord(t *testing.T) {
	for word, want := range map[string]string{"app=nrr": "app=nr", "app=rn": "app=nr", "tier=backend": "",
		"role=frnot": "role=front"} {
		if got := nearestWord(word, []string{"role=front", "app=nr", "x"}); got != want {
			t.Errorf("%s: %q, want %q", word, got, want)
		}
	}
}
