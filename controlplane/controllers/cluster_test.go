package controllers_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// F71: deleting a Deployment deletes its ReplicaSets and pods, and no step takes 5 seconds.
func TestCascade(t *testing.T) {
	for _, policy := range []metav1.DeletionPropagation{metav1.DeletePropagationBackground,
		metav1.DeletePropagationForeground} {
		t.Run(string(policy), func(t *testing.T) { virtual.Test(t, func(t *testing.T) { cascade(t, policy) }) })
	}
}

func cascade(t *testing.T, policy metav1.DeletionPropagation) {
	w := testcluster.StartCluster(t, testcluster.Options{})
	w.CreateObject(testcluster.NewDeployment("web", 20, "web:1"))
	w.AwaitRollout("web", 20)
	if err := client.Delete[*appsv1.Deployment](w.Ctx, w.Admin, "default", "web",
		metav1.DeleteOptions{PropagationPolicy: &policy}); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	w.EventuallyWithin(5*time.Second, "cascade", func() error {
		_, err := client.Get[*appsv1.Deployment](w.Ctx, w.Admin, "default", "web")
		gone := apierrors.IsNotFound(err)
		all, err := client.List[*corev1.Pod](w.Ctx, w.Admin, "default", metav1.ListOptions{})
		if err != nil {
			return err
		}
		if gone && policy == metav1.DeletePropagationForeground && (len(all) > 0 || len(w.ReplicaSets()) > 0) {
			t.Fatalf("the owner went before %d replica sets and %d pods", len(w.ReplicaSets()), len(all))
		}
		if !gone || len(w.ReplicaSets()) > 0 || len(all) > 0 {
			return fmt.Errorf("gone %v, %d replica sets, %d pods", gone, len(w.ReplicaSets()), len(all))
		}
		return nil
	})
	t.Logf("all gone after %v", time.Since(began))
}

// F71: orphaned dependents stay and lose the reference.
func TestOrphan(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{})
		w.CreateObject(testcluster.NewDeployment("web", 3, "web:1"))
		w.AwaitRollout("web", 3)
		policy := metav1.DeletePropagationOrphan
		if err := client.Delete[*appsv1.Deployment](w.Ctx, w.Admin, "default", "web",
			metav1.DeleteOptions{PropagationPolicy: &policy}); err != nil {
			t.Fatal(err)
		}
		w.Eventually("orphaning", func() error {
			if _, err := client.Get[*appsv1.Deployment](w.Ctx, w.Admin, "default", "web"); !apierrors.IsNotFound(err) {
				return fmt.Errorf("the deployment is still there: %v", err)
			}
			return nil
		})
		sets := w.ReplicaSets()
		if len(sets) != 1 || len(sets[0].OwnerReferences) != 0 || len(w.LivePods()) != 3 {
			t.Fatalf("%d replica sets, owners %v, %d pods", len(sets), sets[0].OwnerReferences, len(w.LivePods()))
		}
		// The orphan still does its work.
		if err := client.Delete[*corev1.Pod](w.Ctx, w.Admin, "default", w.LivePods()[0].Name,
			metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.Eventually("replacing a pod of an orphan", func() error {
			if n := len(w.LivePods()); n != 3 {
				return fmt.Errorf("%d pods", n)
			}
			return nil
		})
	})
}

// P12: an object whose owner exists is not collected; one of two owners may be deleted.
func TestCollectorSparesTheOwned(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{})
		owner := func(name string) metav1.OwnerReference {
			w.CreateObject(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}})
			m, err := client.Get[*corev1.ConfigMap](w.Ctx, w.Admin, "default", name)
			if err != nil {
				t.Fatal(err)
			}
			return metav1.OwnerReference{APIVersion: "v1", Kind: "ConfigMap", Name: name, UID: m.UID}
		}
		a, b := owner("a"), owner("b")
		gone := metav1.OwnerReference{APIVersion: "v1", Kind: "ConfigMap", Name: "never", UID: "no-such-uid"}
		recreated := a
		recreated.UID = "of-a-former-a"
		stranger := metav1.OwnerReference{APIVersion: "example.com/v1", Kind: "Thing", Name: "x", UID: "thing"}
		for name, refs := range map[string][]metav1.OwnerReference{
			"two": {a, b}, "half": {a, gone}, "former": {recreated}, "strange": {stranger}, "lost": {gone},
		} {
			w.CreateObject(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name,
				OwnerReferences: refs}})
		}
		if err := client.Delete[*corev1.ConfigMap](w.Ctx, w.Admin, "default", "b", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.Eventually("collecting", func() error {
			list, err := client.List[*corev1.Secret](w.Ctx, w.Admin, "default", metav1.ListOptions{})
			if err != nil {
				return err
			}
			var have []string
			for _, s := range list {
				have = append(have, fmt.Sprintf("%s:%d", s.Name, len(s.OwnerReferences)))
			}
			slices.Sort(have)
			if got := strings.Join(have, " "); got != "half:1 strange:1 two:1" {
				return errors.New(got)
			}
			return nil
		})
	})
}

// P28: a namespace is deleted with its contents, and its status names the remaining objects.
func TestNamespaceDeletion(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{})
		w.CreateObject(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "doomed"}})
		d := testcluster.NewDeployment("web", 3, "web:1")
		d.Namespace = "doomed"
		w.CreateObject(d)
		w.CreateObject(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "doomed", Name: "held",
			Finalizers: []string{"example.com/hold"}}})
		w.Eventually("pods and the namespace's furniture", func() error {
			pods, err := client.List[*corev1.Pod](w.Ctx, w.Admin, "doomed", metav1.ListOptions{})
			if err != nil || len(pods) != 3 {
				return fmt.Errorf("%d pods, %v", len(pods), err)
			}
			if _, err := client.Get[*corev1.ServiceAccount](w.Ctx, w.Admin, "doomed", "default"); err != nil {
				return err
			}
			m, err := client.Get[*corev1.ConfigMap](w.Ctx, w.Admin, "doomed", "kube-root-ca.crt")
			if err == nil && m.Data["ca.crt"] != "PEM" {
				err = errors.New("wrong certificate")
			}
			return err
		})
		if err := client.Delete[*corev1.Namespace](w.Ctx, w.Admin, "", "doomed", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.Eventually("naming the blocker", func() error {
			ns, err := client.Get[*corev1.Namespace](w.Ctx, w.Admin, "", "doomed")
			if err != nil {
				return err
			}
			for _, c := range ns.Status.Conditions {
				if c.Type == corev1.NamespaceFinalizersRemaining && c.Status == corev1.ConditionTrue &&
					c.Message == "Some content in the namespace has finalizers remaining: example.com/hold in 1 "+
						"resource instances" {
					return nil
				}
			}
			return fmt.Errorf("conditions %+v", ns.Status.Conditions)
		})
		m, err := client.Get[*corev1.ConfigMap](w.Ctx, w.Admin, "doomed", "held")
		if err != nil {
			t.Fatal(err)
		}
		m = m.DeepCopy()
		m.Finalizers = nil
		if _, err := client.Update(w.Ctx, w.Admin, m); err != nil {
			t.Fatal(err)
		}
		w.Eventually("the namespace goes", func() error {
			if _, err := client.Get[*corev1.Namespace](w.Ctx, w.Admin, "", "doomed"); !apierrors.IsNotFound(err) {
				return fmt.Errorf("still there: %v", err)
			}
			return nil
		})
	})
}

// P4: the pods of a lost node leave their Service at once and are replaced elsewhere; the node comes back without duplicates.
func TestLostNode(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{})
		w.CreateObject(testcluster.NewService("web"))
		d := testcluster.NewDeployment("web", 6, "web:1")
		stay := int64(2) // as admission fills it in
		for _, key := range []string{corev1.TaintNodeUnreachable, corev1.TaintNodeNotReady} {
			d.Spec.Template.Spec.Tolerations = append(d.Spec.Template.Spec.Tolerations, corev1.Toleration{
				Key: key, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute,
				TolerationSeconds: &stay})
		}
		w.CreateObject(d)
		w.AwaitRollout("web", 6)
		w.Eventually("all endpoints ready", func() error { return endpoints(w, "web", 6) })
		lost := w.LoseNode("w1")
		w.SetNodeReady("w1", corev1.ConditionUnknown)
		w.Eventually("its endpoints leave", func() error { return endpoints(w, "web", 6-lost) })
		w.Eventually("taints", func() error {
			n, err := client.Get[*corev1.Node](w.Ctx, w.Admin, "", "w1")
			if err == nil && len(n.Spec.Taints) != 2 {
				err = fmt.Errorf("taints %v", n.Spec.Taints)
			}
			return err
		})
		w.Eventually("replacing the pods of w1", func() error {
			n := 0
			for _, p := range w.LivePods() {
				if p.Spec.NodeName == "w1" {
					return fmt.Errorf("%s is still on w1", p.Name)
				}
				if api.IsPodReady(p) {
					n++
				}
			}
			if n != 6 {
				return fmt.Errorf("%d ready pods", n)
			}
			return nil
		})
		w.Eventually("endpoints elsewhere", func() error { return endpoints(w, "web", 6) })
		w.Nodes.Mark(w.Nodes.Dead, "w1", false)
		w.SetNodeReady("w1", corev1.ConditionTrue)
		w.Eventually("taints go", func() error {
			n, err := client.Get[*corev1.Node](w.Ctx, w.Admin, "", "w1")
			if err == nil && len(n.Spec.Taints) != 0 {
				err = fmt.Errorf("taints %v", n.Spec.Taints)
			}
			return err
		})
		if n := len(w.LivePods()); n != 6 {
			t.Errorf("%d pods after healing", n)
		}
	})
}

// The pods of a node that no longer exists in the API are deleted by force.
func TestDeletedNode(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{})
		w.CreateObject(testcluster.NewDeployment("web", 6, "web:1"))
		w.AwaitRollout("web", 6)
		w.LoseNode("w1")
		if err := client.Delete[*corev1.Node](w.Ctx, w.Admin, "", "w1", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.Eventually("removing the pods of w1", func() error {
			all, err := client.List[*corev1.Pod](w.Ctx, w.Admin, "default", metav1.ListOptions{})
			if err != nil || len(all) != 6 {
				return fmt.Errorf("%d pods, %v", len(all), err)
			}
			for _, p := range all {
				if p.Spec.NodeName == "w1" || !api.IsPodReady(p) {
					return fmt.Errorf("%s on %q", p.Name, p.Spec.NodeName)
				}
			}
			return nil
		})
	})
}

// endpoints compares the ready addresses of a Service with its ready pods, in slices and in Endpoints.
func endpoints(w *testcluster.Cluster, name string, n int) error {
	list, err := client.List[*discoveryv1.EndpointSlice](w.Ctx, w.Admin, "default",
		metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=" + name})
	if err != nil {
		return err
	}
	var have, legacy, want []string
	for _, s := range list {
		if len(s.Endpoints) > 0 && (len(s.Ports) != 1 || *s.Ports[0].Port != 8080) {
			return fmt.Errorf("ports %v", s.Ports)
		}
		for _, e := range s.Endpoints {
			if *e.Conditions.Ready {
				have = append(have, e.Addresses...)
			}
		}
	}
	for _, p := range w.LivePods() {
		if api.IsPodReady(p) {
			want = append(want, p.Status.PodIP)
		}
	}
	e, err := client.Get[*corev1.Endpoints](w.Ctx, w.Admin, "default", name)
	if err != nil {
		return err
	}
	for _, s := range e.Subsets {
		for _, a := range s.Addresses {
			legacy = append(legacy, a.IP)
		}
	}
	slices.Sort(have)
	slices.Sort(want)
	slices.Sort(legacy)
	if len(want) != n || !slices.Equal(have, want) || !slices.Equal(legacy, want) {
		return fmt.Errorf("%d addresses in slices, %d in endpoints, %d ready pods, the first %q, %q, %q",
			len(have), len(legacy), len(want), have[:min(3, len(have))], legacy[:min(3, len(legacy))],
			want[:min(3, len(want))])
	}
	return nil
}

// F116: a Service has exactly the addresses of ready pods. F113: a pod that becomes unready is
// removed in less than a second.
func TestServiceEndpoints(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{NoMutationGuard: true})
		w.CreateObject(testcluster.NewService("web"))
		w.Eventually("an empty slice", func() error { return endpoints(w, "web", 0) })
		w.CreateObject(testcluster.NewDeployment("web", 120, "web:1"))
		w.AwaitRollout("web", 120)
		w.Eventually("all pods", func() error { return endpoints(w, "web", 120) })
		list, err := client.List[*discoveryv1.EndpointSlice](w.Ctx, w.Admin, "default",
			metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=web"})
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range list {
			if len(s.Endpoints) > 100 {
				t.Errorf("slice %s has %d endpoints", s.Name, len(s.Endpoints))
			}
		}
		w.AwaitRest()
		w.Nodes.Mark(w.Nodes.Held, "web", true)
		p := w.LivePods()[0].DeepCopy()
		p.Status.Conditions[0].Status = corev1.ConditionFalse
		if _, err := client.UpdateStatus(w.Ctx, w.Admin, p); err != nil {
			t.Fatal(err)
		}
		w.EventuallyWithin(time.Second, "the unready pod leaves", func() error { return endpoints(w, "web", 119) })
		if !hasPod(w.LivePods(), p.UID) {
			t.Error("an unready pod was replaced")
		}
		if err := client.Delete[*corev1.Service](w.Ctx, w.Admin, "default", "web", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.Eventually("slices and endpoints go with the Service", func() error {
			list, err := client.List[*discoveryv1.EndpointSlice](w.Ctx, w.Admin, "default", metav1.ListOptions{})
			if err != nil || len(list) > 0 {
				return fmt.Errorf("%d slices, %v", len(list), err)
			}
			if _, err := client.Get[*corev1.Endpoints](w.Ctx, w.Admin, "default", "web"); !apierrors.IsNotFound(err) {
				return fmt.Errorf("endpoints: %v", err)
			}
			return nil
		})
	})
}

// Every node gets its own block, also with many joining at once.
func TestNodeCIDRs(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{NoMutationGuard: true})
		for i := range 60 {
			w.CreateObject(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("n%d", i)}})
		}
		w.Eventually("CIDRs", func() error {
			seen := map[string]string{}
			list, err := client.List[*corev1.Node](w.Ctx, w.Admin, "", metav1.ListOptions{})
			if err != nil {
				return err
			}
			for _, n := range list {
				if n.Spec.PodCIDR == "" {
					return fmt.Errorf("%s has none", n.Name)
				}
				if other := seen[n.Spec.PodCIDR]; other != "" {
					t.Fatalf("%s and %s both have %s", other, n.Name, n.Spec.PodCIDR)
				}
				seen[n.Spec.PodCIDR] = n.Name
			}
			return nil
		})
	})
}

// A claim is bound to the smallest matching volume; both are protected while in use; a released
// volume is not bound again.
func TestVolumes(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{})
		w.CreateObject(testcluster.NewVolume("big", "10Gi"))
		w.CreateObject(testcluster.NewVolume("small", "2Gi"))
		w.Eventually("volumes available", func() error {
			return errors.Join(w.CheckVolumePhase("big", corev1.VolumeAvailable),
				w.CheckVolumePhase("small", corev1.VolumeAvailable))
		})
		w.CreateObject(testcluster.NewClaim("data", "1Gi"))
		w.Eventually("binding", func() error {
			c, err := client.Get[*corev1.PersistentVolumeClaim](w.Ctx, w.Admin, "default", "data")
			if err == nil && (c.Status.Phase != corev1.ClaimBound || c.Spec.VolumeName != "small" ||
				len(c.Finalizers) == 0) {
				err = fmt.Errorf("claim %+v", c)
			}
			return errors.Join(err, w.CheckVolumePhase("small", corev1.VolumeBound))
		})
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "user"},
			Spec: testcluster.NewDeployment("x", 1, "x").Spec.Template.Spec}
		pod.Spec.Volumes = []corev1.Volume{{Name: "d",
			VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{
				ClaimName: "data"}}}}
		w.CreateObject(pod)
		w.Eventually("the pod runs", func() error {
			p, err := client.Get[*corev1.Pod](w.Ctx, w.Admin, "default", "user")
			if err == nil && !api.IsPodReady(p) {
				err = errors.New("not ready")
			}
			return err
		})
		if err := client.Delete[*corev1.PersistentVolumeClaim](w.Ctx, w.Admin, "default", "data",
			metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.CreateObject(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "later"}})
		if c, err := client.Get[*corev1.PersistentVolumeClaim](w.Ctx, w.Admin, "default", "data"); err != nil ||
			c.DeletionTimestamp == nil {
			t.Fatalf("a claim in use: %v, %v", c, err)
		}
		if err := client.Delete[*corev1.Pod](w.Ctx, w.Admin, "default", "user", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.Eventually("the claim goes and its volume is released", func() error {
			if _, err := client.Get[*corev1.PersistentVolumeClaim](w.Ctx, w.Admin, "default",
				"data"); !apierrors.IsNotFound(err) {
				return fmt.Errorf("claim: %v", err)
			}
			return w.CheckVolumePhase("small", corev1.VolumeReleased)
		})
		w.CreateObject(testcluster.NewClaim("data", "1Gi"))
		w.Eventually("the next claim gets the other volume", func() error {
			return w.CheckVolumePhase("big", corev1.VolumeBound)
		})
		if err := w.CheckVolumePhase("small", corev1.VolumeReleased); err != nil {
			t.Error(err)
		}
	})
}
