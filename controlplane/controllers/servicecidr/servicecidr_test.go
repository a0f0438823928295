package servicecidr_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/servicecidr"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// hasAddress looks for the IPAddress of a Service.
func hasAddress(w *testcluster.Cluster, address, service string) error {
	a, err := client.Get[*networkingv1.IPAddress](w.Ctx, w.Admin, "", address)
	if err != nil {
		return err
	}
	if ref := a.Spec.ParentRef; ref.Resource != "services" || ref.Name != service ||
		a.Labels[networkingv1.LabelManagedBy] == "" {
		return fmt.Errorf("%s is of %s/%s, labels %v", address, ref.Resource, ref.Name, a.Labels)
	}
	return nil
}

// F117 F125: a Service of a release without IPAddresses gets one. It is repaired if it is deleted,
// has wrong labels or names another Service, and across any number of leaders.
func TestAddressesAreRepaired(t *testing.T) {
	w := testcluster.New(t, testcluster.Options{NoMutationGuard: true})
	// A Service without an IPAddress.
	if _, err := client.Create(w.Ctx, w.EarlierRelease(nil), testcluster.NewService("web")); err != nil {
		t.Fatal(err)
	}
	lead := func(during func()) {
		t.Helper()
		stop := w.Lead(engine.Options{})
		defer stop()
		if during != nil {
			during()
		}
		w.Eventually("the IPAddress", func() error { return hasAddress(w, "10.96.0.10", "web") })
	}
	lead(nil)
	remove := func() {
		if err := client.Delete[*networkingv1.IPAddress](w.Ctx, w.Admin, "", "10.96.0.10",
			metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	remove()
	lead(nil)
	lead(remove)
	for name, ref := range map[string]networkingv1.ParentReference{
		"a gateway":   {Group: "example.org", Resource: "gateways", Namespace: "default", Name: "g"},
		"no Service":  {Resource: "services", Namespace: "default", Name: "gone"},
		"its own one": {Resource: "services", Namespace: "default", Name: "web"}, // without labels
	} {
		t.Log(name)
		remove()
		w.CreateObject(&networkingv1.IPAddress{ObjectMeta: metav1.ObjectMeta{Name: "10.96.0.10"},
			Spec: networkingv1.IPAddressSpec{ParentRef: &ref}})
		lead(nil)
	}
	stop := w.Lead(engine.Options{})
	defer stop()
	w.Eventually("people are told", func() error {
		events, err := client.List[*corev1.Event](w.Ctx, w.Admin, "default", metav1.ListOptions{})
		for _, e := range events {
			if e.Reason == "ClusterIPNotAllocated" && e.InvolvedObject.Name == "web" {
				return nil
			}
		}
		return fmt.Errorf("no event among %d: %v", len(events), err)
	})
	if err := client.Delete[*corev1.Service](w.Ctx, w.Admin, "default", "web", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Get[*networkingv1.IPAddress](w.Ctx, w.Admin, "", "10.96.0.10"); !apierrors.IsNotFound(err) {
		t.Errorf("the IPAddress did not go with its Service: %v", err)
	}
	w.AwaitRest()
}

// F117: an IPAddress of the allocator without its Service is deleted once it is a minute old, and
// not before.
func TestOrphanedAddressesGo(t *testing.T) {
	w := testcluster.StartCluster(t, testcluster.Options{NoMutationGuard: true,
		ChangeController: func(c *engine.Descriptor) {
			lead := c.Lead
			c.Lead = func(t *engine.Term) engine.Reconcile {
				now := t.Now
				t.Now = func() time.Time { return now().Add(2 * time.Minute) }
				return lead(t)
			}
		}})
	for name, labels := range map[string]map[string]string{
		"10.96.0.50": {networkingv1.LabelManagedBy: "ipallocator.k8s.io"},
		"10.96.0.51": {networkingv1.LabelManagedBy: "example.org"},
	} {
		w.CreateObject(&networkingv1.IPAddress{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels},
			Spec: networkingv1.IPAddressSpec{
				ParentRef: &networkingv1.ParentReference{Resource: "services", Namespace: "default", Name: "gone"}}})
	}
	w.Eventually("the orphan goes", func() error {
		if _, err := client.Get[*networkingv1.IPAddress](w.Ctx, w.Admin, "", "10.96.0.50"); !apierrors.IsNotFound(err) {
			return fmt.Errorf("it is still there: %v", err)
		}
		return nil
	})
	if _, err := client.Get[*networkingv1.IPAddress](w.Ctx, w.Admin, "", "10.96.0.51"); err != nil {
		t.Errorf("somebody else's IPAddress went: %v", err)
	}
}

// F117: the default ServiceCIDR exists and is ready. A deleted ServiceCIDR stays until no address
// needs it, and its status explains that.
func TestServiceCIDRsWaitForAddresses(t *testing.T) {
	w := testcluster.StartCluster(t, testcluster.Options{NoMutationGuard: true})
	ready := func(name string, status metav1.ConditionStatus) {
		t.Helper()
		w.Eventually(name+" is ready: "+string(status), func() error {
			c, err := client.Get[*networkingv1.ServiceCIDR](w.Ctx, w.Admin, "", name)
			if err != nil {
				return err
			}
			have := meta.FindStatusCondition(c.Status.Conditions, networkingv1.ServiceCIDRConditionReady)
			if have == nil || have.Status != status || len(c.Finalizers) != 1 ||
				c.Finalizers[0] != servicecidr.Finalizer {
				return fmt.Errorf("conditions %+v, finalizers %v", c.Status.Conditions, c.Finalizers)
			}
			return nil
		})
	}
	ready("kubernetes", metav1.ConditionTrue)
	cidr := func(name, text string) {
		w.CreateObject(&networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{text}}})
		ready(name, metav1.ConditionTrue)
	}
	remove := func(name string) {
		if err := client.Delete[*networkingv1.ServiceCIDR](w.Ctx, w.Admin, "", name, metav1.DeleteOptions{}); err !=
			nil {
			t.Fatal(err)
		}
	}
	gone := func(name string) {
		t.Helper()
		w.Eventually(name+" goes", func() error {
			if _, err := client.Get[*networkingv1.ServiceCIDR](w.Ctx, w.Admin, "", name); !apierrors.IsNotFound(err) {
				return fmt.Errorf("it is still there: %v", err)
			}
			return nil
		})
	}
	cidr("more", "10.97.0.0/24")
	far := testcluster.NewService("far")
	far.Spec.ClusterIP, far.Spec.ClusterIPs = "10.97.0.5", []string{"10.97.0.5"}
	w.CreateObject(far)
	remove("more")
	ready("more", metav1.ConditionFalse)
	cidr("wider", "10.97.0.0/16") // which has the address too
	gone("more")
	remove("wider")
	ready("wider", metav1.ConditionFalse)
	if err := client.Delete[*corev1.Service](w.Ctx, w.Admin, "default", "far", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	gone("wider")
	cidr("empty", "10.98.0.0/24")
	remove("empty")
	gone("empty")
	remove("kubernetes") // no address is in it: it is created again
	ready("kubernetes", metav1.ConditionTrue)
}

// Events report two Services with one node port, and a Service whose port is out of range: they are
// older than port reservations.
func TestNodePortsAreJudged(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.New(t, testcluster.Options{NoMutationGuard: true})
		before := w.EarlierRelease(func(all *api.Kinds) {
			k := all.ByType(&corev1.Service{})
			k.Commit.Reservations, k.Validation.Object = nil, nil
		})
		for name, port := range map[string]int32{"a-first": 30080, "other": 30081, "second": 30080, "below": 20000} {
			s := testcluster.NewService(name)
			s.Spec.Type, s.Spec.ClusterIP, s.Spec.ClusterIPs = corev1.ServiceTypeNodePort, "", nil
			s.Spec.Ports[0].NodePort, s.Spec.Ports[0].Protocol = port, corev1.ProtocolTCP
			if _, err := client.Create(w.Ctx, before, s); err != nil {
				t.Fatal(err)
			}
		}
		w.Lead(engine.Options{})
		w.AwaitEvent("PortAlreadyAllocated", "Node port 30080/TCP is also assigned to Service default/a-first; create "+
			"this Service again, or change its node port")
		w.AwaitEvent("PortOutOfRange", "Node port 20000/TCP is not within 30000-32767; create the Service again, or "+
			"change its node port")
		list, err := client.List[*corev1.Event](w.Ctx, w.Admin, "default", metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range list {
			if strings.HasPrefix(e.Reason, "Port") && e.InvolvedObject.Name != "second" &&
				e.InvolvedObject.Name != "below" {
				t.Errorf("unexpected Event of %s: %s: %s", e.InvolvedObject.Name, e.Reason, e.Message)
			}
		}
	})
}
