package services

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/apiserver/admission/admissiontest"
)

// behind is a Cluster with an empty cache.
type behind struct{ admissiontest.World }

func (b behind) List(ctx context.Context, resource, namespace string, fresh bool) ([]api.Object, error) {
	if !fresh {
		return nil, nil
	}
	return b.World.List(ctx, resource, namespace, fresh)
}

// F117: a new ServiceCIDR that is not in this replica's cache is used. The range is not considered
// full and its addresses are not rejected. Each allocation requires that the ServiceCIDR still
// exists.
func TestRangesOfAMomentAgo(t *testing.T) {
	more := &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "more"},
		Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.97.0.0/24"}}}
	more.Status.Conditions = []metav1.Condition{{Type: networkingv1.ServiceCIDRConditionReady,
		Status: metav1.ConditionTrue}}
	own := netip.MustParsePrefix("10.96.0.0/29")
	c := Config{Kinds: kinds.All(), Cluster: behind{admissiontest.World{"servicecidrs": {more}}}, ServiceCIDR: own,
		NodePorts: [2]int{30000, 32767},
		AllocateIP: func(_ *api.Attempt, cidr netip.Prefix) (netip.Addr, error) {
			if cidr == own {
				return netip.Addr{}, errors.New("range is full")
			}
			return cidr.Addr().Next().Next(), nil
		}}
	for _, ask := range []string{"", "10.97.0.9"} {
		svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "s"},
			Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, ClusterIP: ask,
				Ports: []corev1.ServicePort{{Port: 80}}}}
		a := &api.Attempt{Kind: c.Kinds.ByType(svc), Operation: api.Create, Namespace: "default", Name: "s",
			Object: svc, Whole: svc}
		if err := AllocateAddresses(c)(t.Context(), a); err != nil {
			t.Fatalf("asking for %q: %v", ask, err)
		}
		if want := cmp.Or(ask, "10.97.0.2"); svc.Spec.ClusterIP != want {
			t.Errorf("asking for %q: got %s, want %s", ask, svc.Spec.ClusterIP, want)
		}
		if err := ReserveAddresses(c)(t.Context(), a); err != nil {
			t.Fatal(err)
		}
		if checks := a.Checks(); len(checks) != 1 || checks[0].Ref.Name != "more" {
			t.Errorf("asking for %q: it is checked that %+v are there", ask, checks)
		}
	}
}
