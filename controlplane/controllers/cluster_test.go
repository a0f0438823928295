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
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
	"keelson.dev/keelson/internal/virtual"
)

// F71: deleting a Deployment deletes its ReplicaSets and pods, and no step takes 5 seconds.
func TestCascade(t *testing.T) {
	for _, policy := range []metav1.DeletionPropagation{metav1.DeletePropagationBackground, metav1.DeletePropagationForeground} {
		t.Run(string(policy), func(t *testing.T) { virtual.Test(t, func(t *testing.T) { cascade(t, policy) }) })
	}
}

func cascade(t *testing.T, policy metav1.DeletionPropagation) {
	w := start(t, options{})
	w.create(app("web", 20, "web:1"))
	w.rolledOut("web", 20)
	if err := client.Delete[*appsv1.Deployment](w.ctx, w.admin, "default", "web", metav1.DeleteOptions{PropagationPolicy: &policy}); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	w.within(5*time.Second, "cascade", func() error {
		_, err := client.Get[*appsv1.Deployment](w.ctx, w.admin, "default", "web")
		gone := apierrors.IsNotFound(err)
		all, err := client.List[*corev1.Pod](w.ctx, w.admin, "default", metav1.ListOptions{})
		if err != nil {
			return err
		}
		if gone && policy == metav1.DeletePropagationForeground && (len(all) > 0 || len(w.sets()) > 0) {
			t.Fatalf("the owner went before %d replica sets and %d pods", len(w.sets()), len(all))
		}
		if !gone || len(w.sets()) > 0 || len(all) > 0 {
			return fmt.Errorf("gone %v, %d replica sets, %d pods", gone, len(w.sets()), len(all))
		}
		return nil
	})
	t.Logf("all gone after %v", time.Since(began))
}

// F71: orphaned dependents stay and lose the reference.
func TestOrphan(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{})
		w.create(app("web", 3, "web:1"))
		w.rolledOut("web", 3)
		policy := metav1.DeletePropagationOrphan
		if err := client.Delete[*appsv1.Deployment](w.ctx, w.admin, "default", "web", metav1.DeleteOptions{PropagationPolicy: &policy}); err != nil {
			t.Fatal(err)
		}
		w.eventually("orphaning", func() error {
			if _, err := client.Get[*appsv1.Deployment](w.ctx, w.admin, "default", "web"); !apierrors.IsNotFound(err) {
				return fmt.Errorf("the deployment is still there: %v", err)
			}
			return nil
		})
		sets := w.sets()
		if len(sets) != 1 || len(sets[0].OwnerReferences) != 0 || len(w.pods()) != 3 {
			t.Fatalf("%d replica sets, owners %v, %d pods", len(sets), sets[0].OwnerReferences, len(w.pods()))
		}
		// The orphan still does its work.
		if err := client.Delete[*corev1.Pod](w.ctx, w.admin, "default", w.pods()[0].Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.eventually("replacing a pod of an orphan", func() error {
			if n := len(w.pods()); n != 3 {
				return fmt.Errorf("%d pods", n)
			}
			return nil
		})
	})
}

// P12: an object whose owner exists is not collected; one of two owners may be deleted.
func TestCollectorSparesTheOwned(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{})
		owner := func(name string) metav1.OwnerReference {
			w.create(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}})
			m, err := client.Get[*corev1.ConfigMap](w.ctx, w.admin, "default", name)
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
			w.create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, OwnerReferences: refs}})
		}
		if err := client.Delete[*corev1.ConfigMap](w.ctx, w.admin, "default", "b", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.eventually("collecting", func() error {
			list, err := client.List[*corev1.Secret](w.ctx, w.admin, "default", metav1.ListOptions{})
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
		w := start(t, options{})
		w.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "doomed"}})
		d := app("web", 3, "web:1")
		d.Namespace = "doomed"
		w.create(d)
		w.create(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "doomed", Name: "held", Finalizers: []string{"example.com/hold"}}})
		w.eventually("pods and the namespace's furniture", func() error {
			pods, err := client.List[*corev1.Pod](w.ctx, w.admin, "doomed", metav1.ListOptions{})
			if err != nil || len(pods) != 3 {
				return fmt.Errorf("%d pods, %v", len(pods), err)
			}
			if _, err := client.Get[*corev1.ServiceAccount](w.ctx, w.admin, "doomed", "default"); err != nil {
				return err
			}
			m, err := client.Get[*corev1.ConfigMap](w.ctx, w.admin, "doomed", "kube-root-ca.crt")
			if err == nil && m.Data["ca.crt"] != "PEM" {
				err = errors.New("wrong certificate")
			}
			return err
		})
		if err := client.Delete[*corev1.Namespace](w.ctx, w.admin, "", "doomed", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.eventually("naming the blocker", func() error {
			ns, err := client.Get[*corev1.Namespace](w.ctx, w.admin, "", "doomed")
			if err != nil {
				return err
			}
			for _, c := range ns.Status.Conditions {
				if c.Type == corev1.NamespaceFinalizersRemaining && c.Status == corev1.ConditionTrue &&
					c.Message == "Some content in the namespace has finalizers remaining: example.com/hold in 1 resource instances" {
					return nil
				}
			}
			return fmt.Errorf("conditions %+v", ns.Status.Conditions)
		})
		m, err := client.Get[*corev1.ConfigMap](w.ctx, w.admin, "doomed", "held")
		if err != nil {
			t.Fatal(err)
		}
		m = m.DeepCopy()
		m.Finalizers = nil
		if _, err := client.Update(w.ctx, w.admin, m); err != nil {
			t.Fatal(err)
		}
		w.eventually("the namespace goes", func() error {
			if _, err := client.Get[*corev1.Namespace](w.ctx, w.admin, "", "doomed"); !apierrors.IsNotFound(err) {
				return fmt.Errorf("still there: %v", err)
			}
			return nil
		})
	})
}

// P4: the pods of a lost node leave their Service at once and are replaced elsewhere; the node comes back without duplicates.
func TestLostNode(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{})
		w.create(service("web"))
		d := app("web", 6, "web:1")
		stay := int64(2) // as admission fills it in
		for _, key := range []string{corev1.TaintNodeUnreachable, corev1.TaintNodeNotReady} {
			d.Spec.Template.Spec.Tolerations = append(d.Spec.Template.Spec.Tolerations, corev1.Toleration{
				Key: key, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute, TolerationSeconds: &stay})
		}
		w.create(d)
		w.rolledOut("web", 6)
		w.eventually("all endpoints ready", func() error { return w.endpoints("web", 6) })
		lost := w.lose("w1")
		w.setReady("w1", corev1.ConditionUnknown)
		w.eventually("its endpoints leave", func() error { return w.endpoints("web", 6-lost) })
		w.eventually("taints", func() error {
			n, err := client.Get[*corev1.Node](w.ctx, w.admin, "", "w1")
			if err == nil && len(n.Spec.Taints) != 2 {
				err = fmt.Errorf("taints %v", n.Spec.Taints)
			}
			return err
		})
		w.eventually("replacing the pods of w1", func() error {
			n := 0
			for _, p := range w.pods() {
				if p.Spec.NodeName == "w1" {
					return fmt.Errorf("%s is still on w1", p.Name)
				}
				if controllers.IsPodReady(p) {
					n++
				}
			}
			if n != 6 {
				return fmt.Errorf("%d ready pods", n)
			}
			return nil
		})
		w.eventually("endpoints elsewhere", func() error { return w.endpoints("web", 6) })
		w.nodes.set(w.nodes.dead, "w1", false)
		w.setReady("w1", corev1.ConditionTrue)
		w.eventually("taints go", func() error {
			n, err := client.Get[*corev1.Node](w.ctx, w.admin, "", "w1")
			if err == nil && len(n.Spec.Taints) != 0 {
				err = fmt.Errorf("taints %v", n.Spec.Taints)
			}
			return err
		})
		if n := len(w.pods()); n != 6 {
			t.Errorf("%d pods after healing", n)
		}
	})
}

// The pods of a node that no longer exists in the API are deleted by force.
func TestDeletedNode(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{})
		w.create(app("web", 6, "web:1"))
		w.rolledOut("web", 6)
		w.lose("w1")
		if err := client.Delete[*corev1.Node](w.ctx, w.admin, "", "w1", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.eventually("removing the pods of w1", func() error {
			all, err := client.List[*corev1.Pod](w.ctx, w.admin, "default", metav1.ListOptions{})
			if err != nil || len(all) != 6 {
				return fmt.Errorf("%d pods, %v", len(all), err)
			}
			for _, p := range all {
				if p.Spec.NodeName == "w1" || !controllers.IsPodReady(p) {
					return fmt.Errorf("%s on %q", p.Name, p.Spec.NodeName)
				}
			}
			return nil
		})
	})
}

func service(name string) *corev1.Service {
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Spec: corev1.ServiceSpec{
		Selector: map[string]string{"app": name}, ClusterIP: "10.96.0.10", ClusterIPs: []string{"10.96.0.10"},
		IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
		Ports:      []corev1.ServicePort{{Name: "http", Port: 80, TargetPort: intstr.FromString("http"), Protocol: corev1.ProtocolTCP}},
	}}
}

// endpoints compares the ready addresses of a Service with its ready pods, in slices and in Endpoints.
func (w *world) endpoints(name string, n int) error {
	list, err := client.List[*discoveryv1.EndpointSlice](w.ctx, w.admin, "default", metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=" + name})
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
	for _, p := range w.pods() {
		if controllers.IsPodReady(p) {
			want = append(want, p.Status.PodIP)
		}
	}
	e, err := client.Get[*corev1.Endpoints](w.ctx, w.admin, "default", name)
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
			len(have), len(legacy), len(want), have[:min(3, len(have))], legacy[:min(3, len(legacy))], want[:min(3, len(want))])
	}
	return nil
}

// F116: a Service has exactly the addresses of ready pods. F113: a pod that becomes unready is
// removed in less than a second.
func TestServiceEndpoints(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{quiet: true})
		w.create(service("web"))
		w.eventually("an empty slice", func() error { return w.endpoints("web", 0) })
		w.create(app("web", 120, "web:1"))
		w.rolledOut("web", 120)
		w.eventually("all pods", func() error { return w.endpoints("web", 120) })
		list, err := client.List[*discoveryv1.EndpointSlice](w.ctx, w.admin, "default", metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=web"})
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range list {
			if len(s.Endpoints) > 100 {
				t.Errorf("slice %s has %d endpoints", s.Name, len(s.Endpoints))
			}
		}
		w.atRest()
		w.nodes.set(w.nodes.held, "web", true)
		p := w.pods()[0].DeepCopy()
		p.Status.Conditions[0].Status = corev1.ConditionFalse
		if _, err := client.UpdateStatus(w.ctx, w.admin, p); err != nil {
			t.Fatal(err)
		}
		w.within(time.Second, "the unready pod leaves", func() error { return w.endpoints("web", 119) })
		if !hasPod(w.pods(), p.UID) {
			t.Error("an unready pod was replaced")
		}
		if err := client.Delete[*corev1.Service](w.ctx, w.admin, "default", "web", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.eventually("slices and endpoints go with the Service", func() error {
			list, err := client.List[*discoveryv1.EndpointSlice](w.ctx, w.admin, "default", metav1.ListOptions{})
			if err != nil || len(list) > 0 {
				return fmt.Errorf("%d slices, %v", len(list), err)
			}
			if _, err := client.Get[*corev1.Endpoints](w.ctx, w.admin, "default", "web"); !apierrors.IsNotFound(err) {
				return fmt.Errorf("endpoints: %v", err)
			}
			return nil
		})
	})
}

// Every node gets its own block, also with many joining at once.
func TestNodeCIDRs(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{quiet: true})
		for i := range 60 {
			w.create(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("n%d", i)}})
		}
		w.eventually("CIDRs", func() error {
			seen := map[string]string{}
			list, err := client.List[*corev1.Node](w.ctx, w.admin, "", metav1.ListOptions{})
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

func storage(size string) corev1.ResourceList {
	return corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(size)}
}

func volume(name, size string) *corev1.PersistentVolume {
	return &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PersistentVolumeSpec{
		Capacity: storage(size), AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
		PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
		PersistentVolumeSource:        corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/data"}},
	}}
}

func claim(name, size string) *corev1.PersistentVolumeClaim {
	class := ""
	return &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Spec: corev1.PersistentVolumeClaimSpec{
		StorageClassName: &class, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
		Resources: corev1.VolumeResourceRequirements{Requests: storage(size)},
	}}
}

// A claim is bound to the smallest matching volume; both are protected while in use; a released
// volume is not bound again.
func TestVolumes(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{})
		w.create(volume("big", "10Gi"))
		w.create(volume("small", "2Gi"))
		w.eventually("volumes available", func() error {
			return errors.Join(w.volumeIs("big", corev1.VolumeAvailable), w.volumeIs("small", corev1.VolumeAvailable))
		})
		w.create(claim("data", "1Gi"))
		w.eventually("binding", func() error {
			c, err := client.Get[*corev1.PersistentVolumeClaim](w.ctx, w.admin, "default", "data")
			if err == nil && (c.Status.Phase != corev1.ClaimBound || c.Spec.VolumeName != "small" || len(c.Finalizers) == 0) {
				err = fmt.Errorf("claim %+v", c)
			}
			return errors.Join(err, w.volumeIs("small", corev1.VolumeBound))
		})
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "user"}, Spec: app("x", 1, "x").Spec.Template.Spec}
		pod.Spec.Volumes = []corev1.Volume{{Name: "d", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "data"}}}}
		w.create(pod)
		w.eventually("the pod runs", func() error {
			p, err := client.Get[*corev1.Pod](w.ctx, w.admin, "default", "user")
			if err == nil && !controllers.IsPodReady(p) {
				err = errors.New("not ready")
			}
			return err
		})
		if err := client.Delete[*corev1.PersistentVolumeClaim](w.ctx, w.admin, "default", "data", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.create(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "later"}})
		if c, err := client.Get[*corev1.PersistentVolumeClaim](w.ctx, w.admin, "default", "data"); err != nil || c.DeletionTimestamp == nil {
			t.Fatalf("a claim in use: %v, %v", c, err)
		}
		if err := client.Delete[*corev1.Pod](w.ctx, w.admin, "default", "user", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.eventually("the claim goes and its volume is released", func() error {
			if _, err := client.Get[*corev1.PersistentVolumeClaim](w.ctx, w.admin, "default", "data"); !apierrors.IsNotFound(err) {
				return fmt.Errorf("claim: %v", err)
			}
			return w.volumeIs("small", corev1.VolumeReleased)
		})
		w.create(claim("data", "1Gi"))
		w.eventually("the next claim gets the other volume", func() error { return w.volumeIs("big", corev1.VolumeBound) })
		if err := w.volumeIs("small", corev1.VolumeReleased); err != nil {
			t.Error(err)
		}
	})
}

func (w *world) volumeIs(name string, phase corev1.PersistentVolumePhase) error {
	v, err := client.Get[*corev1.PersistentVolume](w.ctx, w.admin, "", name)
	if err == nil && v.Status.Phase != phase {
		err = fmt.Errorf("volume %s is %s", name, v.Status.Phase)
	}
	return err
}
