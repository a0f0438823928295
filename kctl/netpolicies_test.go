package kctl

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Pods that policies isolate are shown with those policies and with what their node dropped; a node that does not
// answer is named, and the exit code says so.
func TestNetPolicies(t *testing.T) {
	meta := func(name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: "shop", Name: name,
			Labels: map[string]string{"app": strings.Split(name, "-")[0]}}
	}
	both := []networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress}
	db := metav1.LabelSelector{MatchLabels: map[string]string{"app": "db"}}
	pod := func(name, node string) corev1.Pod {
		return corev1.Pod{ObjectMeta: meta(name), Spec: corev1.PodSpec{NodeName: node}}
	}
	host := pod("db-host", "w1")
	host.Spec.HostNetwork = true
	page := ""
	for _, metric := range []string{metricDroppedPackets, metricDroppedBytes} {
		page += fmt.Sprintf("%s{namespace=\"shop\",pod=\"db-0\",direction=\"ingress\"} "+
			"7\n%s{namespace=\"shop\",pod=\"db-1\",direction=\"egress\"} 8\n", metric, metric)
	}
	run := netVerb(t, "policies", map[string]any{
		"/apis/networking.k8s.io/v1/namespaces/shop/networkpolicies": networkingv1.NetworkPolicyList{
			Items: []networkingv1.NetworkPolicy{
				{ObjectMeta: meta("mute"), Spec: networkingv1.NetworkPolicySpec{PodSelector: db, PolicyTypes: both}},
				{ObjectMeta: meta("deny"), Spec: networkingv1.NetworkPolicySpec{PodSelector: db}}}},
		"/api/v1/namespaces/shop/pods": corev1.PodList{Items: []corev1.Pod{pod("web-0", "w1"), pod("db-1", "w2"),
			pod("db-0", "w1"), host}},
		"/api/v1/namespaces/shop/pods/web-0": pod("web-0", "w1"),
		"/api/v1/nodes": corev1.NodeList{
			Items: []corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "w1"}},
				{ObjectMeta: metav1.ObjectMeta{Name: "w2"}}}},
		"/api/v1/nodes/w1/proxy/metrics": page,
	})
	out, complaints, err := run()
	// What w1 says of a pod of w2 is not that pod's.
	if want := "NAMESPACE   POD    NODE   INGRESS BY   EGRESS BY   DROPPED IN   DROPPED OUT\n" +
		"shop        db-0   w1     deny,mute    mute        7            0\n" +
		"shop        db-1   w2     deny,mute    mute        0            0\n"; out != want {
		t.Errorf("got\n%s\nwant\n%s", out, want)
	}
	if !errors.Is(err, errFound) || !strings.Contains(complaints, "node w2: ") {
		t.Errorf("a node that does not answer: %v, %q", err, complaints)
	}
	if out, _, _ = run("web-0"); !strings.Contains(out,
		"shop        web-0   w1     -            -           0            0\n") {
		t.Errorf("a pod that nobody isolates:\n%s", out)
	}
	if _, _, err := run("-A", "db-0"); err == nil || !strings.Contains(err.Error(), "leave out the name") {
		t.Errorf("a name in all namespaces: %v", err)
	}
}
