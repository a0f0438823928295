package attack

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/test/testenv"
)

// reportAddress writes an address into the status of a pod, with the credentials of its node.
func reportAddress(thief kubernetes.Interface, ns, pod, address string) error {
	patch, err := json.Marshal(map[string]any{"status": v1.PodStatus{Phase: v1.PodRunning, PodIP: address,
		PodIPs:     []v1.PodIP{{IP: address}},
		Conditions: []v1.PodCondition{{Type: v1.PodReady, Status: v1.ConditionTrue}}}})
	if err != nil {
		return err
	}
	_, err = thief.CoreV1().Pods(ns).Patch(context.Background(), pod, types.MergePatchType, patch,
		metav1.PatchOptions{}, "status")
	return err
}

// Cost: the key of one node. Its thief cannot move a pod of the node to the address of another
// node's pod, of a Service or of a machine, with any report about the node's network. A mirror pod
// with matching labels does not open a policy and does not become an endpoint of a Service.
func TestStolenNodeKeyAddresses(t *testing.T) {
	cs, ctx := guardCluster(t), context.Background()
	ns, thief := testenv.Namespace(t), nodeClient(t, "w1")
	victim := startServer(t, cs, ns, "victim", "w2")
	friend := startPodOn(t, cs, ns, "friend", "w2", toolsImage, "sh", "-c", "sleep 1000000")
	attacker := startPodOn(t, cs, ns, "attacker", "w1", toolsImage, "sh", "-c", "sleep 1000000")
	if _, err := cs.NetworkingV1().NetworkPolicies(ns).Create(ctx,
		&networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Name: "only-friend"},
			Spec: networkingv1.NetworkPolicySpec{PodSelector: metav1.LabelSelector{
				MatchLabels: map[string]string{"app": "victim"}},
				Ingress: []networkingv1.NetworkPolicyIngressRule{{From: []networkingv1.NetworkPolicyPeer{{
					PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "friend"}}}}}}}},
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	svc, err := cs.CoreV1().Services(ns).Create(ctx,
		&v1.Service{ObjectMeta: metav1.ObjectMeta{Name: "shop"}, Spec: v1.ServiceSpec{
			Selector: map[string]string{"app": "victim"},
			Ports:    []v1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(8080)}}}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	machine := func(node string) string {
		n, err := cs.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range n.Status.Addresses {
			if a.Type == v1.NodeInternalIP {
				return a.Address
			}
		}
		t.Fatalf("node %s has no address", node)
		return ""
	}
	foreign := []byte(`{"metadata":{"annotations":{"keelson.dev/pod-network":"foreign"}}}`)
	for what, address := range map[string]string{"a pod of another node": friend,
		"the range of another node": gatewayOf(friend) + "99",
		"a Service":                 svc.Spec.ClusterIP, "another machine": machine("w2"),
		"its own machine": machine("w1"),
		"loopback":        "127.0.0.1"} {
		if _, err := thief.CoreV1().Nodes().Patch(ctx, "w1", types.MergePatchType, foreign,
			metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
		if err := reportAddress(thief, ns, "attacker", address); !apierrors.IsForbidden(err) {
			t.Errorf("a pod of the thief's node gets the address of %s (%s): %v", what, address, err)
		}
	}
	// The mirror pods' address is that of a pod of the thief's node.
	mirror := func(app string) error {
		_, err := thief.CoreV1().Pods(ns).Create(ctx,
			&v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "mirror-" + app, Labels: map[string]string{"app": app},
				Annotations: map[string]string{v1.MirrorPodAnnotationKey: "x"}},
				Spec: v1.PodSpec{NodeName: "w1", Containers: []v1.Container{{Name: "c", Image: "i"}}}},
			metav1.CreateOptions{})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return err
		}
		return reportAddress(thief, ns, "mirror-"+app, attacker)
	}
	kctl := filepath.Join(testenv.Lab().Config.BinDir, "kctl")
	visitAs := func(pod string) error {
		_, err := testenv.Try(t, kctl, "-n", ns, "exec", pod, "--", "wget", "-T", "2", "-q", "-O", "-",
			"http://"+victim+":8080/")
		return err
	}
	testenv.Eventually(t, soon, func() error { return visitAs("friend") })
	for range 5 {
		for _, app := range []string{"friend", "victim"} { // the node's own agent removes them again
			testenv.Eventually(t, soon, func() error { return mirror(app) })
		}
		if visitAs("attacker") == nil {
			t.Error("a mirror pod with the labels of a friend opens the policy to the thief's pod")
		}
		testenv.Eventually(t, soon, func() error {
			list, err := cs.DiscoveryV1().EndpointSlices(ns).List(ctx,
				metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=shop"})
			if err != nil {
				return err
			}
			var got []string
			for _, s := range list.Items {
				for _, e := range s.Endpoints {
					got = append(got, e.Addresses...)
				}
			}
			if slices.Contains(got, attacker) {
				t.Errorf("a mirror pod is an endpoint of the victim's Service: %v", got)
			}
			if !slices.Contains(got, victim) {
				return fmt.Errorf("the Service has endpoints %v, want %s", got, victim)
			}
			return nil
		})
	}
}
