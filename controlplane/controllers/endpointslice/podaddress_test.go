package endpointslice_test

import (
	"fmt"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api/podaddress"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/endpoints"
	"keelson.dev/keelson/controlplane/controllers/endpointslice"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// F116: pod addresses that a node reports but its pods cannot have, and addresses of mirror pods,
// are not endpoints of a Service, neither in EndpointSlices nor in Endpoints. A pod's endpoint
// follows changes of its node: podCIDRs, network, addresses. A pod of another node is affected,
// too, when the node gets podCIDRs.
func TestEndpointsOfReportedAddresses(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{Controllers: func(d engine.Deps) []*engine.Descriptor {
			return []*engine.Descriptor{endpointslice.New(d), endpoints.New(d)}
		}})
		node := func(name, network string, cidrs ...string) {
			t.Helper()
			w.Nodes.Mark(w.Nodes.Dead, name, true) // the test reports for it
			w.CreateObject(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name,
				Annotations: map[string]string{podaddress.NetworkAnnotation: network}},
				Spec: corev1.NodeSpec{PodCIDRs: cidrs}})
		}
		pod := func(name, node, ip string, change func(p *corev1.Pod)) {
			t.Helper()
			p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name,
				Labels: map[string]string{"app": "web"}},
				Spec: corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "c", Image: "i"}}}}
			if change != nil {
				change(p)
			}
			w.CreateObject(p)
			testcluster.Edit(w, p, client.UpdateStatus[*corev1.Pod], func(p *corev1.Pod) {
				p.Status.Phase, p.Status.PodIP, p.Status.PodIPs = corev1.PodRunning, ip, []corev1.PodIP{{IP: ip}}
				p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
			})
		}
		become := func(step string, want ...string) {
			t.Helper()
			w.Eventually(step, func() error {
				list, err := client.List[*discoveryv1.EndpointSlice](w.Ctx, w.Admin, "default", metav1.ListOptions{})
				if err != nil {
					return err
				}
				var got, legacy []string
				for _, s := range list {
					for _, e := range s.Endpoints {
						got = append(got, e.Addresses...)
					}
				}
				all, err := client.Get[*corev1.Endpoints](w.Ctx, w.Admin, "default", "web")
				if err != nil {
					return err
				}
				for _, s := range all.Subsets {
					for _, a := range s.Addresses {
						legacy = append(legacy, a.IP)
					}
				}
				slices.Sort(got)
				if slices.Sort(legacy); !slices.Equal(got, want) || !slices.Equal(legacy, want) {
					return fmt.Errorf("EndpointSlices have %v, Endpoints have %v, want %v", got, legacy, want)
				}
				return nil
			})
		}
		node("a", podaddress.OwnNetwork, "10.244.1.0/24")
		node("late", podaddress.OwnNetwork)
		node("foreign", podaddress.ForeignNetwork)
		w.CreateObject(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
			Spec: corev1.ServiceSpec{
				ClusterIP: "10.96.7.7", ClusterIPs: []string{"10.96.7.7"},
				IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
				Selector:   map[string]string{"app": "web"},
				Ports:      []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolTCP}}}})
		pod("good", "a", "10.244.1.2", nil)
		become("a pod with an address of its node", "10.244.1.2")
		pod("range", "a", "10.244.2.9", nil)
		pod("outside", "a", "203.0.113.9", nil)
		pod("service", "foreign", "10.96.0.10", nil)
		pod("stolen", "foreign", "10.244.1.2", nil)
		pod("host", "foreign", "192.168.1.1", func(p *corev1.Pod) { p.Spec.HostNetwork = true })
		pod("mirror", "a", "10.244.1.3", func(p *corev1.Pod) {
			p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x"}
		})
		pod("squatter", "foreign", "10.244.9.4", nil)
		pod("early", "late", "10.244.9.5", nil)
		become("only addresses that can be the pods'", "10.244.1.2", "10.244.9.4")
		testcluster.Update(w, "late", func(n *corev1.Node) {
			n.Spec.PodCIDR, n.Spec.PodCIDRs = "10.244.9.0/24", []string{"10.244.9.0/24"}
		})
		become("a node gets its podCIDR", "10.244.1.2", "10.244.9.5")
		testcluster.Edit(w, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "foreign"}},
			client.UpdateStatus[*corev1.Node], func(n *corev1.Node) {
				n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.168.1.1"}}
			})
		become("a node reports its address", "10.244.1.2", "10.244.9.5", "192.168.1.1")
		pod("free", "foreign", "10.112.0.9", nil)
		become("an address outside of all ranges", "10.112.0.9", "10.244.1.2", "10.244.9.5", "192.168.1.1")
		more := &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "more"},
			Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.112.0.0/16"}}}
		w.CreateObject(more)
		become("the address is in a new ServiceCIDR", "10.244.1.2", "10.244.9.5", "192.168.1.1")
		if err := client.Delete[*networkingv1.ServiceCIDR](w.Ctx, w.Admin, "", more.Name,
			metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		become("the ServiceCIDR is gone", "10.112.0.9", "10.244.1.2", "10.244.9.5", "192.168.1.1")
	})
}
