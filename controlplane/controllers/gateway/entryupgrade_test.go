package gateway_test

import (
	"fmt"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/deployment"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/garbagecollector"
	"keelson.dev/keelson/controlplane/controllers/gateway"
	"keelson.dev/keelson/controlplane/controllers/ingress"
	"keelson.dev/keelson/controlplane/controllers/replicaset"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
)

// proxies are the pods of proxies that are ready and stay, by image, of a class ("ingress") and of a Gateway ("gateway").
func proxies(w *testcluster.Cluster) (out map[string]map[string]int, err error) {
	list, err := client.List[*corev1.Pod](w.Ctx, w.Admin, ingress.Namespace, metav1.ListOptions{})
	out = map[string]map[string]int{"ingress": {}, "gateway": {}}
	for _, p := range list {
		ready := slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
		})
		of := "ingress"
		if p.Labels["keelson.dev/gateway"] != "" {
			of = "gateway"
		}
		if ready && p.DeletionTimestamp == nil {
			out[of][p.Spec.Containers[0].Image]++
		}
	}
	return out, err
}

// A leader of the next release replaces the proxies of Ingresses and Gateways by proxies of its own
// image, one by one: two of each are ready at all times. A leader of the previous release replaces
// them again, and a repetition changes nothing.
func TestUpgradeReplacesProxies(t *testing.T) {
	releases := map[string][]*engine.Descriptor{}
	const first, next = "keelson.dev/entry:v1.2.0", "keelson.dev/entry:v1.3.0"
	w := testcluster.New(t, testcluster.Options{Controllers: func(d engine.Deps) []*engine.Descriptor {
		for _, image := range []string{first, next} {
			releases[image] = []*engine.Descriptor{ingress.New(d, ingress.Options{Image: image}),
				gateway.New(d, gateway.Options{Image: image})}
		}
		return []*engine.Descriptor{deployment.New(d), replicaset.New(d), garbagecollector.New(d)}
	}})
	for i := range 3 {
		w.AddNode(fmt.Sprintf("w%d", i+1))
	}
	kinds := gatewayKinds()
	for _, k := range kinds {
		if err := w.Admin.Kinds().Register(k); err != nil {
			t.Fatal(err)
		}
	}
	w.CreateObject(testcluster.NewIngressClass("own", "keelson.dev/ingress"))
	testcluster.CreateCustom(w, kinds["GatewayClass"],
		"metadata: {name: k}\nspec: {controllerName: keelson.dev/gateway}")
	testcluster.CreateCustom(w, kinds["Gateway"],
		"metadata: {name: web, namespace: default}\nspec: {gatewayClassName: k, listeners: [{name: http, port: 80, "+
			"protocol: HTTP}]}")
	shared, began := w.Controllers, false
	for _, image := range []string{first, next, first} {
		w.Controllers = append(slices.Clone(shared), releases[image]...)
		stop := w.Lead(engine.Options{})
		w.Eventually("the proxies of "+image, func() error {
			now, err := proxies(w)
			if err != nil {
				return err
			}
			for of, ready := range now {
				if all := ready[first] + ready[next]; began && all < 2 {
					t.Errorf("%s: only %d proxies are ready on the way to %s", of, all, image)
				}
				if len(ready) != 1 || ready[image] != 2 {
					err = fmt.Errorf("ready are %v", now)
				}
			}
			return err
		})
		began = true
		stop()
	}
	before, err := client.List[*corev1.Pod](w.Ctx, w.Admin, ingress.Namespace, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	w.Lead(engine.Options{})
	w.CreateObject(testcluster.NewIngressClass("another", "keelson.dev/ingress"))
	w.Eventually("the proxies of another class", func() error {
		now, err := proxies(w)
		if err == nil && now["ingress"][first] != 4 {
			err = fmt.Errorf("ready are %v", now)
		}
		return err
	})
	for _, p := range before {
		if now, err := client.Get[*corev1.Pod](w.Ctx, w.Admin, p.Namespace, p.Name); p.DeletionTimestamp == nil &&
			(err != nil || now.UID != p.UID) {
			t.Errorf("a leader of the same release replaced %s: %v", p.Name, err)
		}
	}
}
