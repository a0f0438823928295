package services_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/client"
)

// F117: the IPAddress of a Service is created and deleted in the commits that allocate and release
// the address.
func TestServicesHaveIPAddresses(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	services, addresses := r.Admin().CoreV1().Services("default"), r.Admin().NetworkingV1().IPAddresses()
	svc := func(name, ip string) *corev1.Service {
		return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: corev1.ServiceSpec{ClusterIP: ip, Ports: []corev1.ServicePort{{Port: 80}}}}
	}
	before := r.Store.Applied()
	a, err := services.Create(ctx, svc("a", ""), metav1.CreateOptions{})
	if err != nil || r.Store.Applied() != before+1 {
		t.Fatalf("%v: the Service and its IPAddress are %d commits", err, r.Store.Applied()-before)
	}
	ip, err := addresses.Get(ctx, a.Spec.ClusterIP, metav1.GetOptions{})
	if err != nil || ip.Spec.ParentRef == nil ||
		*ip.Spec.ParentRef != (networkingv1.ParentReference{Resource: "services", Namespace: "default", Name: "a"}) ||
		ip.Labels[networkingv1.LabelManagedBy] != "ipallocator.k8s.io" ||
		ip.Labels[networkingv1.LabelIPAddressFamily] != "IPv4" || ip.UID == "" {
		t.Fatalf("%v %+v", err, ip)
	}
	gone := func(what, address string) {
		t.Helper()
		if _, err := addresses.Get(ctx, address, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			t.Errorf("%s: the IPAddress is still there: %v", what, err)
		}
	}
	// A change of type releases it, the way back takes one.
	was := a.Spec.ClusterIP
	a.Spec.Type, a.Spec.ExternalName = corev1.ServiceTypeExternalName, "example.org"
	if a, err = services.Update(ctx, a, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	gone("an external name", was)
	a.Spec.Type, a.Spec.ExternalName = corev1.ServiceTypeClusterIP, ""
	if a, err = services.Update(ctx, a, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := addresses.Get(ctx, a.Spec.ClusterIP, metav1.GetOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := services.Delete(ctx, "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	gone("a deletion", a.Spec.ClusterIP)
	// What another owner has is not given out: not when it is asked for, and not when it is picked.
	gateway := &networkingv1.IPAddress{ObjectMeta: metav1.ObjectMeta{Name: "10.96.0.77"},
		Spec: networkingv1.IPAddressSpec{
			ParentRef: &networkingv1.ParentReference{Group: "example.org", Resource: "gateways",
				Namespace: "default", Name: "g"}}}
	if _, err := addresses.Create(ctx, gateway, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	before = r.Store.Applied()
	if _, err := services.Create(ctx, svc("b", "10.96.0.77"), metav1.CreateOptions{}); !apierrors.IsInvalid(err) ||
		!strings.Contains(err.Error(), "provided IP is already allocated") || r.Store.Applied() != before {
		t.Errorf("the address of a gateway: %v, %d commits", err, r.Store.Applied()-before)
	}
	if _, err := services.Create(ctx, svc("none", corev1.ClusterIPNone), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	gone("a headless Service", "None")
}

// F117: an address that another object uses is skipped, and ready ServiceCIDRs extend the range.
func TestServiceCIDRsExtendTheRange(t *testing.T) {
	// 10.96.0.2 to 6
	r := apiservertest.StartReplica(t, func(c *apiserver.Config) {
		c.Network.ServiceCIDR = netip.MustParsePrefix("10.96.0.0/29")
	})
	ctx := apiservertest.Within(t)
	services, cidrs := r.Admin().CoreV1().Services("default"), r.Admin().NetworkingV1().ServiceCIDRs()
	create := func(name, ip string) (*corev1.Service, error) {
		return services.Create(ctx, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: corev1.ServiceSpec{ClusterIP: ip, Ports: []corev1.ServicePort{{Port: 80}}}}, metav1.CreateOptions{})
	}
	for _, name := range []string{"10.96.0.3", "10.96.0.5"} {
		if _, err := r.Admin().NetworkingV1().IPAddresses().Create(ctx,
			&networkingv1.IPAddress{ObjectMeta: metav1.ObjectMeta{Name: name},
				Spec: networkingv1.IPAddressSpec{ParentRef: &networkingv1.ParentReference{Resource: "gateways",
					Name: "g"}}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"a", "b", "c"} { // 2, 4 and 6
		if s, err := create(name, ""); err != nil {
			t.Fatalf("%s: %v", name, err)
		} else if ip := s.Spec.ClusterIP; ip == "10.96.0.3" || ip == "10.96.0.5" {
			t.Errorf("%s got %s, which something else has", name, ip)
		}
	}
	if _, err := create("d", ""); err == nil || !strings.Contains(err.Error(), "range is full") {
		t.Fatalf("a full range: %v", err)
	}
	more, err := cidrs.Create(ctx, &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "more"},
		Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.97.0.0/24"}}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := create("d", "10.97.0.9"); !apierrors.IsInvalid(err) ||
		!strings.Contains(err.Error(), "not in the valid range") {
		t.Errorf("a range that is not ready: %v", err)
	}
	more.Status.Conditions = []metav1.Condition{{Type: networkingv1.ServiceCIDRConditionReady,
		Status: metav1.ConditionTrue,
		Reason: "Ready", LastTransitionTime: metav1.Now()}}
	if more, err = cidrs.UpdateStatus(ctx, more, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	d, err := create("d", "")
	if err != nil || !strings.HasPrefix(d.Spec.ClusterIP, "10.97.0.") {
		t.Fatalf("of the further range: %v %v", d.Spec.ClusterIP, err)
	}
	if _, err := create("e", "10.97.0.9"); err != nil {
		t.Errorf("chosen of the further range: %v", err)
	}
	more.Finalizers = []string{"example.org/hold"}
	if _, err = cidrs.Update(ctx, more, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := cidrs.Delete(ctx, "more", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := create("f", "10.97.0.10"); !apierrors.IsInvalid(err) {
		t.Errorf("of a range that is to go: %v", err)
	}
	d.Spec.Selector = map[string]string{"a": "b"}
	if _, err := services.Update(ctx, d, metav1.UpdateOptions{}); err != nil {
		t.Errorf("a Service whose range is to go cannot be changed: %v", err)
	}
}

// F117: concurrent writers through three replicas exhaust a small range. No address is allocated
// twice, and each Service has exactly its IPAddress.
func TestServiceAddressesAreUnique(t *testing.T) {
	_, clients := apiservertest.StartPipelines(t, func(c *apiserver.Config) {
		c.Network.ServiceCIDR = netip.MustParsePrefix("10.96.0.0/28")
	})
	seed := rand.Uint64()
	var writers sync.WaitGroup
	for n := range 6 {
		writers.Go(func() { changeServicesAtRandom(t, clients[n%3], rand.New(rand.NewPCG(seed, uint64(n))), n) })
	}
	writers.Wait()
	services, err := client.List[*corev1.Service](t.Context(), clients[0], "", metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	holder := map[string]string{}
	for _, s := range services {
		if ip := s.Spec.ClusterIP; ip != "" && holder[ip] != "" {
			t.Errorf("seed %d: %s is that of %s and %s", seed, ip, holder[ip], s.Name)
		} else if ip != "" {
			holder[ip] = s.Name
		}
	}
	addresses, err := client.List[*networkingv1.IPAddress](t.Context(), clients[0], "", metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addresses {
		if a.Spec.ParentRef.Name != holder[a.Name] {
			t.Errorf("seed %d: the IPAddress %s names %q, %q has it", seed, a.Name, a.Spec.ParentRef.Name,
				holder[a.Name])
		}
	}
	if len(addresses) != len(holder) {
		t.Errorf("seed %d: %d IPAddresses for %d addresses", seed, len(addresses), len(holder))
	}
}

// changeServicesAtRandom creates, changes and deletes its own Services.
func changeServicesAtRandom(t *testing.T, c *client.Client, rng *rand.Rand, n int) {
	ctx := t.Context()
	for range 40 {
		name := fmt.Sprintf("w%d-%d", n, rng.IntN(4))
		have, err := client.Get[*corev1.Service](ctx, c, "default", name)
		have = have.DeepCopy() // what is got is shared
		switch {
		case apierrors.IsNotFound(err):
			s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
				Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}
			if rng.IntN(3) == 0 {
				s.Spec.ClusterIP = fmt.Sprintf("10.96.0.%d", 2+rng.IntN(12))
			}
			_, err = client.Create(ctx, c, s)
		case err != nil:
		case rng.IntN(2) == 0:
			err = client.Delete[*corev1.Service](ctx, c, "default", name, metav1.DeleteOptions{})
		case have.Spec.Type == corev1.ServiceTypeExternalName:
			have.Spec.Type, have.Spec.ExternalName = corev1.ServiceTypeClusterIP, ""
			_, err = client.Update(ctx, c, have)
		default:
			have.Spec.Type, have.Spec.ExternalName = corev1.ServiceTypeExternalName, "example.org"
			_, err = client.Update(ctx, c, have)
		}
		if err != nil && !apierrors.IsInvalid(err) && !apierrors.IsConflict(err) &&
			!strings.Contains(err.Error(), "range is full") {
			t.Errorf("writer %d: %v", n, err)
		}
	}
}

// F38: an update that changes only clusterIP is rejected, and an update without addresses keeps
// them.
func TestServiceKeepsItsAddress(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	services := r.Admin().CoreV1().Services("default")
	made, err := services.Create(ctx, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "a"},
		Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	other := netip.MustParseAddr(made.Spec.ClusterIP).Next().String()
	_, err = services.Patch(ctx, "a", types.MergePatchType, fmt.Appendf(nil, `{"spec":{"clusterIP":%q}}`, other),
		metav1.PatchOptions{})
	if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "spec.clusterIPs[0]") ||
		!strings.Contains(err.Error(), "may not change once set") {
		t.Errorf("a patch of clusterIP: %v", err)
	}
	replaced := made.DeepCopy()
	replaced.Spec.ClusterIP, replaced.ResourceVersion = other, ""
	if _, err := services.Update(ctx, replaced, metav1.UpdateOptions{}); !apierrors.IsInvalid(err) {
		t.Errorf("an update of clusterIP: %v", err)
	}
	replaced.Spec.ClusterIP, replaced.Spec.ClusterIPs = "", nil
	kept, err := services.Update(ctx, replaced, metav1.UpdateOptions{})
	if err != nil || kept.Spec.ClusterIP != made.Spec.ClusterIP {
		t.Errorf("an update without addresses: %v, %+v", err, kept)
	}
}
