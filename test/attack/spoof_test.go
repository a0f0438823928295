package attack

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/test/testenv"
)

const spooferImage = "keelson.dev/spoofer:v1"

// startPodOn starts a pod on a node and returns its address.
func startPodOn(t *testing.T, cs kubernetes.Interface, ns, name, node, image string, command ...string) string {
	t.Helper()
	zero := int64(0)
	p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": name}},
		Spec: v1.PodSpec{NodeName: node,
			TerminationGracePeriodSeconds: &zero, Containers: []v1.Container{{Name: "main", Image: image,
				Command: command}}}}
	if _, err := cs.CoreV1().Pods(ns).Create(context.Background(), p, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	ip := ""
	testenv.Eventually(t, soon, func() error {
		got, err := cs.CoreV1().Pods(ns).Get(context.Background(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if ip = got.Status.PodIP; got.Status.Phase != v1.PodRunning || ip == "" {
			return fmt.Errorf("pod %s is %s", name, got.Status.Phase)
		}
		return nil
	})
	return ip
}

// A container with a raw socket costs its attacker one pod. Under another pod's address it does not reach a pod of its
// node past a NetworkPolicy, and it does not draw another pod's traffic to itself by ARP.
func TestPodsCannotSpoof(t *testing.T) {
	cs := guardCluster(t)
	program := filepath.Join(testenv.Build(t, "keelson.dev/keelson/test/attack/spoofer"), "spoofer")
	testenv.LoadImage(t, spooferImage, map[string]string{"spoofer": program}, "/spoofer")
	ns, node := testenv.Namespace(t), "w2"
	attacker := startPodOn(t, cs, ns, "attacker", node, spooferImage, "/spoofer", "wait")
	friend := startPodOn(t, cs, ns, "friend", node, toolsImage, "sh", "-c", "sleep 1000000")
	victim := startPodOn(t, cs, ns, "victim", node, "keelson.dev/hello:v1")
	open := startPodOn(t, cs, ns, "open", node, "keelson.dev/hello:v1")
	only := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Name: "only-friend"},
		Spec: networkingv1.NetworkPolicySpec{
			PodSelector: metav1.LabelSelector{MatchLabels: map[string]string{"app": "victim"}},
			Ingress: []networkingv1.NetworkPolicyIngressRule{{From: []networkingv1.NetworkPolicyPeer{{
				PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "friend"}}}}}}}}
	if _, err := cs.NetworkingV1().NetworkPolicies(ns).Create(context.Background(), only,
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	kctl := filepath.Join(testenv.Lab().Config.BinDir, "kctl")
	spoof := func(args ...string) string {
		t.Helper()
		return strings.TrimSpace(testenv.Kctl(t,
			append([]string{"-n", ns, "exec", "attacker", "--", "/spoofer"}, args...)...))
	}
	asFriend := func() (string, error) {
		return testenv.Try(t, kctl, "-n", ns, "exec", "friend", "--", "wget", "-T", "5", "-q", "-O", "-",
			"http://"+victim+":8080/")
	}
	testenv.Eventually(t, soon, func() error {
		if got := spoof("syn", attacker, victim, "8080"); got != "no answer" {
			return fmt.Errorf("the policy is not in force: %s", got)
		}
		_, err := asFriend()
		return err
	})
	if got := spoof("syn", attacker, open, "8080"); got != "answered" {
		t.Fatalf("the attacker does not reach a pod that it may reach: %s", got)
	}
	for source, whose := range map[string]string{friend: "the friend", open: "a pod of its node",
		gatewayOf(attacker): "the node"} {
		for _, target := range []string{victim, open} {
			if target == source {
				continue
			}
			if got := spoof("syn", source, target, "8080"); got != "no answer" {
				t.Errorf("as %s (%s) the attacker reaches %s: %s", whose, source, target, got)
			}
		}
	}
	poisoned := make(chan string, 1)
	go func() {
		out, err := testenv.Try(t, kctl, "-n", ns, "exec", "attacker", "--", "/spoofer", "arp", friend, victim, "5")
		poisoned <- fmt.Sprint(strings.TrimSpace(out), " ", err)
	}()
	for range 5 {
		if out, err := asFriend(); err != nil {
			t.Errorf("the friend does not reach the victim during the attack: %v: %s", err, out)
		}
	}
	if got := <-poisoned; got != "packets: 0 <nil>" {
		t.Errorf("the attacker gets what the friend sends to the victim: %s", got)
	}
}

// gatewayOf returns the first address of the node's range, in which a pod's IPv4 address is.
func gatewayOf(pod string) string { return pod[:strings.LastIndexByte(pod, '.')+1] + "1" }
