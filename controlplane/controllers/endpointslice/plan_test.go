package endpointslice

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"pgregory.net/rapid"
)

func service(change func(s *corev1.Service)) *corev1.Service {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web", UID: "svc",
		Labels: map[string]string{"team": "a"}},
		Spec: corev1.ServiceSpec{ClusterIP: "10.96.0.1", IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			Ports: []corev1.ServicePort{{Name: "http", Port: 80, TargetPort: intstr.FromString("web"),
				Protocol: corev1.ProtocolTCP}}}}
	if change != nil {
		change(s)
	}
	return s
}

// pod number n, ready, with the port named web.
func pod(n int, change func(p *corev1.Pod)) *corev1.Pod {
	ip := fmt.Sprintf("10.244.%d.%d", n/250, n%250+1)
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: fmt.Sprint("p", n),
		UID: types.UID(fmt.Sprint("u", n))},
		Spec: corev1.PodSpec{NodeName: "w1",
			Containers: []corev1.Container{{Ports: []corev1.ContainerPort{{Name: "web", ContainerPort: 8080}}}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ip,
			PodIPs:     []corev1.PodIP{{IP: ip}, {IP: fmt.Sprintf("fd00::%x", n+1)}},
			Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}}}
	if change != nil {
		change(p)
	}
	return p
}

// show formats slices: address ready/serving/terminating, sorted, with the ports.
func show(list []*discoveryv1.EndpointSlice) string {
	var out []string
	for _, s := range list {
		for _, e := range s.Endpoints {
			var ports []string
			for _, p := range s.Ports {
				ports = append(ports, fmt.Sprint(*p.Name, ":", *p.Port))
			}
			out = append(out, fmt.Sprintf("%s %v/%v/%v %s", e.Addresses[0], *e.Conditions.Ready, *e.Conditions.Serving,
				*e.Conditions.Terminating, strings.Join(ports, ",")))
		}
	}
	slices.Sort(out)
	return strings.Join(out, "; ")
}

// F116 and the conditions of endpoints.
func TestEndpoints(t *testing.T) {
	unready := func(p *corev1.Pod) { p.Status.Conditions = nil }
	going := func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)} }
	for _, c := range []struct {
		name string
		svc  func(s *corev1.Service)
		pods []*corev1.Pod
		want string
	}{
		{"ready", nil, []*corev1.Pod{pod(0, nil)}, "10.244.0.1 true/true/false http:8080"},
		{"not ready", nil, []*corev1.Pod{pod(0, unready)}, "10.244.0.1 false/false/false http:8080"},
		{"not ready but published", func(s *corev1.Service) {
			s.Spec.PublishNotReadyAddresses = true
		}, []*corev1.Pod{pod(0, unready)}, "10.244.0.1 true/false/false http:8080"},
		{"going and still serving", nil, []*corev1.Pod{pod(0, going)}, "10.244.0.1 false/true/true http:8080"},
		{"without an address", nil, []*corev1.Pod{pod(0, func(p *corev1.Pod) {
			p.Status.PodIP, p.Status.PodIPs = "", nil
		})}, ""},
		{"ended", nil, []*corev1.Pod{pod(0, func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed })}, ""},
		{"named ports differ between pods", nil, []*corev1.Pod{pod(0, nil), pod(1, func(p *corev1.Pod) {
			p.Spec.Containers[0].Ports[0].ContainerPort = 9090
		})},
			"10.244.0.1 true/true/false http:8080; 10.244.0.2 true/true/false http:9090"},
		{"a pod without the named port", nil, []*corev1.Pod{pod(0, func(p *corev1.Pod) {
			p.Spec.Containers[0].Ports = nil
		})}, "10.244.0.1 true/true/false "},
		{"a number", func(s *corev1.Service) {
			s.Spec.Ports[0].TargetPort = intstr.FromInt32(81)
		}, []*corev1.Pod{pod(0, nil)}, "10.244.0.1 true/true/false http:81"},
		{"no target port means the same", func(s *corev1.Service) {
			s.Spec.Ports[0].TargetPort = intstr.IntOrString{}
		}, []*corev1.Pod{pod(0, nil)}, "10.244.0.1 true/true/false http:80"},
		{"both families", func(s *corev1.Service) {
			s.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
		}, []*corev1.Pod{pod(0, nil)},
			"10.244.0.1 true/true/false http:8080; fd00::1 true/true/false http:8080"},
		{"headless without ports", func(s *corev1.Service) {
			s.Spec.ClusterIP, s.Spec.Ports = "None", nil
		}, []*corev1.Pod{pod(0, nil)}, "10.244.0.1 true/true/false "},
	} {
		t.Run(c.name, func(t *testing.T) {
			plan := Reconcile(service(c.svc), c.pods, nil, Nodes{Zone: map[string]string{"w1": "z"}})
			if len(plan.Update)+len(plan.Delete) > 0 {
				t.Fatal("there is nothing to update or delete")
			}
			if got := show(plan.Create); got != c.want {
				t.Errorf("got  %s\nwant %s", got, c.want)
			}
		})
	}
}

func TestSliceMetadata(t *testing.T) {
	headless := func(s *corev1.Service) { s.Spec.ClusterIP = "None" }
	hosted := func(p *corev1.Pod) { p.Spec.Hostname, p.Spec.Subdomain = "db-0", "web" }
	s := Reconcile(service(headless), []*corev1.Pod{pod(0, hosted)}, nil,
		Nodes{Zone: map[string]string{"w1": "z"}}).Create[0]
	if s.GenerateName != "web-" || s.Labels[discoveryv1.LabelServiceName] != "web" ||
		s.Labels[discoveryv1.LabelManagedBy] != ManagedBy || s.Labels["team"] != "a" {
		t.Errorf("metadata %+v", s.ObjectMeta)
	}
	if _, ok := s.Labels[corev1.IsHeadlessService]; !ok {
		t.Error("a headless service's slice is not marked")
	}
	if ref := metav1.GetControllerOf(s); ref == nil || ref.Kind != "Service" || ref.UID != "svc" {
		t.Errorf("owner %+v", ref)
	}
	e := s.Endpoints[0]
	if *e.NodeName != "w1" || *e.Zone != "z" || *e.Hostname != "db-0" || e.TargetRef.UID != "u0" || e.Hints != nil {
		t.Errorf("endpoint %+v", e)
	}
}

// apply performs a plan on a list of slices.
func apply(have []*discoveryv1.EndpointSlice, p Plan, next *int) []*discoveryv1.EndpointSlice {
	out := slices.Clone(have)
	for _, c := range p.Create {
		*next++
		c.Name, c.UID = fmt.Sprint("s", *next), types.UID(fmt.Sprint("s", *next))
		out = append(out, c)
	}
	for _, u := range p.Update {
		i := slices.IndexFunc(out, func(s *discoveryv1.EndpointSlice) bool { return s.Name == u.Name })
		out[i] = u
	}
	return slices.DeleteFunc(out, func(s *discoveryv1.EndpointSlice) bool {
		return slices.ContainsFunc(p.Delete, func(d *discoveryv1.EndpointSlice) bool { return d.Name == s.Name })
	})
}

// The first pod of a Service takes the empty slice over: one write, and none between.
func TestPlaceholderIsReused(t *testing.T) {
	next := 0
	have := apply(nil, Reconcile(service(nil), nil, nil, Nodes{}), &next)
	if len(have) != 1 || len(have[0].Endpoints) != 0 {
		t.Fatalf("a service without pods has %d slices", len(have))
	}
	if p := Reconcile(service(nil), nil, have, Nodes{}); len(p.Create)+len(p.Update)+len(p.Delete) > 0 {
		t.Fatalf("nothing changed, and yet %+v", p)
	}
	p := Reconcile(service(nil), []*corev1.Pod{pod(0, nil)}, have, Nodes{})
	if len(p.Create) != 0 || len(p.Delete) != 0 || len(p.Update) != 1 {
		t.Fatalf("plan %+v", p)
	}
	have = apply(have, p, &next)
	p = Reconcile(service(nil), nil, have, Nodes{})
	if len(p.Create) != 0 || len(p.Delete) != 0 || len(p.Update) != 1 || len(p.Update[0].Endpoints) != 0 {
		t.Fatalf("the last pod goes: %+v", p)
	}
}

// One change among many touches one slice.
func TestSmallChangeSmallWrite(t *testing.T) {
	var pods []*corev1.Pod
	for i := range 250 {
		pods = append(pods, pod(i, nil))
	}
	next := 0
	have := apply(nil, Reconcile(service(nil), pods, nil, Nodes{}), &next)
	if len(have) != 3 {
		t.Fatalf("%d slices for 250 pods", len(have))
	}
	pods[120] = pod(120, func(p *corev1.Pod) { p.Status.Conditions = nil })
	p := Reconcile(service(nil), pods, have, Nodes{})
	if len(p.Create) != 0 || len(p.Update) != 1 || len(p.Delete) != 0 {
		t.Errorf("create %d, update %d, delete %d", len(p.Create), len(p.Update), len(p.Delete))
	}
}

// F116: after any changes, the slices match the pods exactly; no slice is too large or superfluous.
func TestSlicesFollowPods(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		chance := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		svc := service(nil)
		var have []*discoveryv1.EndpointSlice
		next := 0
		for range 4 {
			n := chance.IntN(230)
			var pods []*corev1.Pod
			for range n {
				pods = append(pods, pod(chance.IntN(400), func(p *corev1.Pod) {
					if chance.IntN(3) == 0 {
						p.Status.Conditions = nil
					}
					if chance.IntN(4) == 0 {
						p.Spec.Containers[0].Ports[0].ContainerPort = 9090
					}
				}))
			}
			slices.SortFunc(pods, func(a, b *corev1.Pod) int { return strings.Compare(a.Name, b.Name) })
			pods = slices.CompactFunc(pods, func(a, b *corev1.Pod) bool { return a.Name == b.Name })
			have = apply(have, Reconcile(svc, pods, have, Nodes{}), &next)
			if got, want := show(have), show(apply(nil, Reconcile(svc, pods, nil, Nodes{}), &next)); got != want {
				t.Fatalf("got\n%s\nwant\n%s", got, want)
			}
			for _, s := range have {
				if len(s.Endpoints) > MaxEndpoints || len(s.Endpoints) == 0 && len(have) > 1 {
					t.Fatalf("slice %s has %d endpoints", s.Name, len(s.Endpoints))
				}
			}
			if p := Reconcile(svc, pods, have, Nodes{}); len(p.Create)+len(p.Update)+len(p.Delete) > 0 {
				t.Fatalf("not at rest: %+v", p)
			}
		}
	})
}

// F116: slices that the Service does not own are deleted and replaced, as in Kubernetes: the garbage collector deletes the
// slices of a previous Service of the same name.
func TestSlicesOfAnotherOwnerAreReplaced(t *testing.T) {
	for about, disown := range map[string]func(s *discoveryv1.EndpointSlice){
		"previous Service": func(s *discoveryv1.EndpointSlice) { s.OwnerReferences[0].UID = "previous" },
		"another kind":     func(s *discoveryv1.EndpointSlice) { s.OwnerReferences[0].Kind = "Endpoints" },
		"no owner":         func(s *discoveryv1.EndpointSlice) { s.OwnerReferences = nil },
	} {
		for _, pods := range [][]*corev1.Pod{nil, {pod(0, nil), pod(1, nil)}} {
			svc := service(nil)
			old := Reconcile(svc, pods, nil, Nodes{}).Create[0]
			old.Name = "web-1"
			kept := old.DeepCopy()
			kept.OwnerReferences = append([]metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: "n",
				UID: "n"}}, kept.OwnerReferences...)
			if p := Reconcile(svc, pods, []*discoveryv1.EndpointSlice{kept}, Nodes{}); len(p.Create)+len(p.Update)+
				len(p.Delete) != 0 {
				t.Errorf("%s: an owned slice is changed: %+v", about, p)
			}
			disown(old)
			p := Reconcile(svc, pods, []*discoveryv1.EndpointSlice{old}, Nodes{})
			if len(p.Create) != 1 || len(p.Update) != 0 || len(p.Delete) != 1 || p.Delete[0] != old ||
				show(p.Create) != show([]*discoveryv1.EndpointSlice{old}) {
				t.Errorf("%s, %d pods: created %d, updated %d, deleted %d", about, len(pods), len(p.Create),
					len(p.Update), len(p.Delete))
			}
		}
	}
}
