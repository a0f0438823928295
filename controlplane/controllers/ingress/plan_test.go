package ingress

import (
	"slices"
	"strings"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// One node has one proxy, which must be able to leave it; two need no more than two.
func TestPlanBySize(t *testing.T) {
	class := &networkingv1.IngressClass{ObjectMeta: metav1.ObjectMeta{Name: "own", UID: "u"}}
	for nodes, want := range map[int]int32{0: 1, 1: 1, 2: 2, 50: 2} {
		m := PlanProxy(class, DefaultImage, nodes)
		if *m.Deployment.Spec.Replicas != want || (m.Budget != nil) != (want > 1) {
			t.Errorf("%d nodes: %d replicas, budget %v", nodes, *m.Deployment.Spec.Replicas, m.Budget)
		}
		if !metav1.IsControlledBy(m.Deployment, class) || !metav1.IsControlledBy(m.Service, class) {
			t.Errorf("%d nodes: the objects are nobody's", nodes)
		}
	}
	one, two := PlanProxy(class, DefaultImage, 1), PlanProxy(class, DefaultImage, 2)
	if one.Deployment.Annotations[madeAnnotation] == two.Deployment.Annotations[madeAnnotation] {
		t.Error("another Deployment has the same digest")
	}
	if again := PlanProxy(class, DefaultImage, 3); again.Deployment.Annotations[madeAnnotation] !=
		two.Deployment.Annotations[madeAnnotation] {
		t.Error("the same Deployment has another digest")
	}
}

// Proxies of the previous release, which --entry-image may name, exit at an unknown flag.
func TestProxiesOfTheReleaseBeforeKnowTheirFlags(t *testing.T) {
	known := []string{"ingress-class", "gateway", "certificates", "status-address", "access-log",
		"trusted-proxies", "linger"}
	class := &networkingv1.IngressClass{ObjectMeta: metav1.ObjectMeta{Name: "own", UID: "u"}}
	for _, arg := range PlanProxy(class, DefaultImage, 1).Deployment.Spec.Template.Spec.Containers[0].Args {
		name, _, _ := strings.Cut(strings.TrimLeft(arg, "-"), "=")
		if !slices.Contains(known, name) {
			t.Errorf("proxies are given --%s, which those of the release before do not know: read it in one release, "+
				"and give it in the next", name)
		}
	}
}
