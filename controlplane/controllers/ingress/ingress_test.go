package ingress_test

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/ingress"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/ingressproxy/pairs"
	"keelson.dev/keelson/test/testenv/keypair"
)

func ingressTo(name, class, service string) *networkingv1.Ingress {
	return &networkingv1.Ingress{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: networkingv1.IngressSpec{
			IngressClassName: &class,
			DefaultBackend: &networkingv1.IngressBackend{Service: &networkingv1.IngressServiceBackend{
				Name: service, Port: networkingv1.ServiceBackendPort{Number: 80}}},
		}}
}

// A class gets its proxies, with the permissions that the controller declares, and loses them when
// it is deleted. Its Ingresses get their addresses and, once, an event about problems. Nothing is
// created for a class of another controller.
func TestIngressClasses(t *testing.T) {
	w := testcluster.StartCluster(t, testcluster.Options{Engine: engine.Options{OwnIdentity: true}})
	w.CreateObject(testcluster.NewIngressClass("own", "keelson.dev/ingress"))
	w.CreateObject(testcluster.NewIngressClass("other", "example.com/ingress"))
	made := func(class string) error {
		d, err := client.Get[*appsv1.Deployment](w.Ctx, w.Admin, ingress.Namespace, class)
		if err != nil {
			return err
		}
		_, service := client.Get[*corev1.Service](w.Ctx, w.Admin, ingress.Namespace, class)
		_, budget := client.Get[*policyv1.PodDisruptionBudget](w.Ctx, w.Admin, ingress.Namespace, class)
		if *d.Spec.Replicas != 2 {
			err = fmt.Errorf("%d replicas", *d.Spec.Replicas)
		}
		return errors.Join(err, service, budget)
	}
	w.Eventually("the proxy of the class", func() error { return made("own") })
	if err := made("other"); !apierrors.IsNotFound(err) {
		t.Errorf("somebody else's class: %v", err)
	}
	w.CreateObject(ingressTo("web", "own", "lost"))
	w.CreateObject(ingressTo("foreign", "other", "lost"))
	told := func() (count int32, of []string) {
		list, err := client.List[*corev1.Event](w.Ctx, w.Admin, "default", metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range list {
			if e.Reason == "NotServed" && strings.Contains(e.Message, "Service lost does not exist") {
				count, of = count+e.Count, append(of, e.InvolvedObject.Name)
			}
		}
		return count, of
	}
	w.Eventually("the event", func() error {
		if n, _ := told(); n == 0 {
			return errors.New("no event")
		}
		return nil
	})
	s, err := client.Get[*corev1.Service](w.Ctx, w.Admin, ingress.Namespace, "own")
	if err != nil {
		t.Fatal(err)
	}
	testcluster.Edit(w, s, client.UpdateStatus, func(o *corev1.Service) {
		o.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.1"}}
	})
	w.Eventually("the address", func() error {
		i, err := client.Get[*networkingv1.Ingress](w.Ctx, w.Admin, "default", "web")
		if err == nil && fmt.Sprint(i.Status.LoadBalancer.Ingress) != "[{192.0.2.1  []}]" {
			err = fmt.Errorf("%v", i.Status.LoadBalancer.Ingress)
		}
		return err
	})
	if n, of := told(); n != 1 || of[0] != "web" {
		t.Errorf("%d events, of %v", n, of)
	}
	// Changes by users stay, and deleted objects are created again.
	d, err := client.Get[*appsv1.Deployment](w.Ctx, w.Admin, ingress.Namespace, "own")
	if err != nil {
		t.Fatal(err)
	}
	three := int32(3)
	testcluster.Edit(w, d, client.Update, func(o *appsv1.Deployment) { o.Spec.Replicas = &three })
	if err := client.Delete[*corev1.Service](w.Ctx, w.Admin, ingress.Namespace, "own", metav1.DeleteOptions{}); err !=
		nil {
		t.Fatal(err)
	}
	w.Eventually("the Service again", func() error {
		_, err := client.Get[*corev1.Service](w.Ctx, w.Admin, ingress.Namespace, "own")
		return err
	})
	if d, err := client.Get[*appsv1.Deployment](w.Ctx, w.Admin, ingress.Namespace, "own"); err != nil ||
		*d.Spec.Replicas != 3 {
		t.Errorf("%v, %v", d, err)
	}
	if err := client.Delete[*networkingv1.IngressClass](w.Ctx, w.Admin, "", "own", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	w.Eventually("the proxy goes with its class", func() error {
		if err := made("own"); !apierrors.IsNotFound(err) {
			return fmt.Errorf("there: %v", err)
		}
		return nil
	})
}

// The key pairs of a class's Ingresses are provided to its proxies and updated. Other data in the
// Secrets are removed. The key pairs are removed with the Ingresses.
func TestIngressPairs(t *testing.T) {
	w := testcluster.New(t, testcluster.Options{Controllers: func(d engine.Deps) []*engine.Descriptor {
		return []*engine.Descriptor{ingress.New(d, ingress.Options{})}
	}})
	w.Lead(engine.Options{OwnIdentity: true})
	w.CreateObject(testcluster.NewIngressClass("own", "keelson.dev/ingress"))
	i := ingressTo("web", "own", "shop")
	i.Spec.TLS = []networkingv1.IngressTLS{{SecretName: "pair"}}
	w.CreateObject(i)
	pair := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "pair"},
		Type: corev1.SecretTypeTLS, Data: keypair.Data(t, "a.example")}
	given := func() map[string][]byte {
		out := map[string][]byte{}
		list, err := client.List[*corev1.Secret](w.Ctx, w.Admin, ingress.Namespace,
			metav1.ListOptions{LabelSelector: "keelson.dev/ingress-class=own"})
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range list {
			maps.Copy(out, s.Data)
		}
		return out
	}
	certificate, key := pairs.FileNames("default", "pair")
	is := func(what string, of map[string][]byte) {
		t.Helper()
		w.Eventually(what, func() error {
			want := map[string][]byte{}
			if of != nil {
				want = map[string][]byte{certificate: of[corev1.TLSCertKey], key: of[corev1.TLSPrivateKeyKey]}
			}
			if got := given(); !maps.EqualFunc(got, want, bytes.Equal) {
				return fmt.Errorf("given are %d files", len(got))
			}
			return nil
		})
	}
	w.CreateObject(pair)
	is("the pair", pair.Data)
	next := keypair.Data(t, "a.example")
	stored, err := client.Get[*corev1.Secret](w.Ctx, w.Admin, "default", "pair")
	if err != nil {
		t.Fatal(err)
	}
	testcluster.Edit(w, stored, client.Update, func(s *corev1.Secret) { s.Data = next })
	is("the new pair", next)
	shard, err := client.List[*corev1.Secret](w.Ctx, w.Admin, ingress.Namespace,
		metav1.ListOptions{LabelSelector: "keelson.dev/ingress-class=own"})
	if err != nil || len(shard) != 1 {
		t.Fatal(shard, err)
	}
	testcluster.Edit(w, shard[0], client.Update, func(s *corev1.Secret) { s.Data["more"] = []byte("x") })
	is("the pair alone", next)
	if err := client.Delete[*corev1.Secret](w.Ctx, w.Admin, ingress.Namespace, shard[0].Name,
		metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	is("the pair again", next)
	if d, err := client.Get[*appsv1.Deployment](w.Ctx, w.Admin, ingress.Namespace, "own"); err != nil ||
		!slices.ContainsFunc(d.Spec.Template.Spec.Volumes[0].Projected.Sources, func(p corev1.VolumeProjection) bool {
			return p.Secret.Name == shard[0].Name
		}) {
		t.Errorf("the proxies do not mount %s: %v", shard[0].Name, err)
	}
	// An Ingress that changes its class moves its key pairs to the other class.
	web, err := client.Get[*networkingv1.Ingress](w.Ctx, w.Admin, "default", "web")
	if err != nil {
		t.Fatal(err)
	}
	other := "other"
	testcluster.Edit(w, web, client.Update, func(i *networkingv1.Ingress) { i.Spec.IngressClassName = &other })
	is("nothing", nil)
	w.CheckRules(t)
}
