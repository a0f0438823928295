package configrestart_test

import (
	"fmt"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

var restartsAsked = map[string]string{api.RestartAnnotation: "true"}

// configured has the pods of a template see ConfigMap conf and Secret key.
func configured(t *corev1.PodTemplateSpec) {
	t.Spec.Containers[0].EnvFrom = []corev1.EnvFromSource{
		{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "conf"}}},
		{SecretRef: &corev1.SecretEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "key"}}},
	}
}

func holding(v string) (*corev1.ConfigMap, *corev1.Secret) {
	at := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: "default", Name: name} }
	return &corev1.ConfigMap{ObjectMeta: at("conf"), Data: map[string]string{"v": v}},
		&corev1.Secret{ObjectMeta: at("key"), Type: corev1.SecretTypeOpaque, Data: map[string][]byte{"v": []byte(v)}}
}

// reconfigure changes both objects, one after the other.
func reconfigure(w *testcluster.Cluster, v string) {
	testcluster.Update(w, "conf", func(m *corev1.ConfigMap) { m.Data["v"] = v })
	testcluster.Update(w, "key", func(s *corev1.Secret) { s.Data["v"] = []byte(v) })
}

// A workload that requests it gets new pods when its ConfigMaps and Secrets change: once for
// changes that come together, by the workload's own strategy, and not for changes that keep the
// contents.
func TestRestartOnConfigChange(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{})
		m, s := holding("1")
		w.CreateObject(m)
		w.CreateObject(s)
		web, still, db, log := testcluster.NewDeployment("web", 2, "web:1"),
			testcluster.NewDeployment("still", 1, "web:1"), testcluster.NewStatefulSet("db", 2, "db:1"),
			testcluster.NewDaemonSet("log", "log:1", nil)
		db.Spec.VolumeClaimTemplates = nil
		for _, tpl := range []*corev1.PodTemplateSpec{&web.Spec.Template, &still.Spec.Template, &db.Spec.Template,
			&log.Spec.Template} {
			configured(tpl)
		}
		for _, o := range []api.Object{web, db, log} {
			o.SetAnnotations(restartsAsked)
		}
		for _, o := range []api.Object{web, still, db, log} {
			w.CreateObject(o)
		}
		done := func() {
			w.AwaitRollout("web", 2)
			w.AwaitRollout("still", 1)
			w.AwaitStatefulSet("db", 2)
			w.AwaitDaemons("log", "log:1", "w1", "w2", "w3")
			w.AwaitRest()
		}
		uids := func() map[string]string {
			out := map[string]string{}
			for _, p := range w.LivePods() {
				out[p.Labels["app"]] += string(p.UID) + " "
			}
			return out
		}
		// unchanged runs something and sees that no pod is replaced for it.
		unchanged := func(what string, do func()) {
			before := uids()
			do()
			time.Sleep(5 * time.Second)
			done()
			if after := uids(); fmt.Sprint(before) != fmt.Sprint(after) {
				t.Errorf("%s: the pods were %v, they are %v", what, before, after)
			}
		}
		done()
		unchanged("nothing", func() {})
		before := uids()
		reconfigure(w, "2")
		time.Sleep(5 * time.Second)
		done()
		for name, after := range uids() {
			if replaced := after != before[name]; replaced != (name != "still") {
				t.Errorf("pods of %s were replaced: %t", name, replaced)
			}
		}
		if n := len(w.ReplicaSets()); n != 3 { // the one of still, and two of web: both changes are one rollout
			t.Errorf("%d replica sets", n)
		}
		w.AwaitEvent("ConfigChanged", "pods are replaced because of a change in configmaps/conf, secrets/key")
		unchanged("labels", func() {
			testcluster.Update(w, "conf", func(m *corev1.ConfigMap) { m.Labels = map[string]string{"a": "b"} })
		})
		unchanged("a ConfigMap that goes and comes back", func() {
			if err := client.Delete[*corev1.ConfigMap](w.Ctx, w.Admin, "default", "conf",
				metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
			time.Sleep(5 * time.Second)
			m, _ := holding("2")
			w.CreateObject(m)
		})
		testcluster.Update(w, "web", func(d *appsv1.Deployment) { delete(d.Annotations, api.RestartAnnotation) })
		testcluster.Update(w, "db", func(d *appsv1.StatefulSet) { d.Annotations[api.RestartAnnotation] = "false" })
		testcluster.Update(w, "log", func(d *appsv1.DaemonSet) { delete(d.Annotations, api.RestartAnnotation) })
		unchanged("workloads without the annotation", func() { reconfigure(w, "3") })
	})
}

// Regardless of lost calls, crashes and leader changes: at the end the pods have the latest
// contents, and there were no more rollouts than changes.
func TestRestartsUnderFailures(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.New(t, testcluster.Options{NoMutationGuard: true,
			ChangeController: testcluster.FailReconciles("config-restart-controller", 2, time.Millisecond)})
		settings := engine.Options{Resync: time.Second}
		stop := w.Lead(settings)
		defer func() { stop() }()
		w.AddNode("w1")
		m, s := holding("0")
		w.CreateObject(m)
		w.CreateObject(s)
		web := testcluster.NewDeployment("web", 2, "web:1")
		web.Annotations = restartsAsked
		configured(&web.Spec.Template)
		w.CreateObject(web)
		w.AwaitRollout("web", 2)
		seen := func() (string, string) {
			d, err := client.Get[*appsv1.Deployment](w.Ctx, w.Admin, "default", "web")
			if err != nil {
				t.Fatal(err)
			}
			return d.Annotations[api.ConfigSeenAnnotation], d.Spec.Template.Annotations[api.ConfigAnnotation]
		}
		w.Eventually("the first look", func() error {
			if notes, _ := seen(); notes == "" {
				return fmt.Errorf("nothing is noted")
			}
			return nil
		})
		const changes = 6
		for i := range changes {
			before, _ := seen()
			reconfigure(w, fmt.Sprint(i+1))
			if i%2 == 1 {
				stop()
				stop = w.Lead(settings)
			}
			w.EventuallyWithin(time.Minute, "the change is seen", func() error {
				if notes, _ := seen(); notes == before {
					return fmt.Errorf("still %s", notes)
				}
				return nil
			})
		}
		time.Sleep(5 * time.Second)
		w.AwaitRollout("web", 2)
		_, want := seen()
		for _, p := range w.LivePods() {
			if got := p.Annotations[api.ConfigAnnotation]; got != want || want == "" {
				t.Errorf("%s is of configuration %q, the newest is %q", p.Name, got, want)
			}
		}
		if n := len(w.ReplicaSets()); n > 1+2*changes {
			t.Errorf("%d replica sets for %d changes of two objects", n, changes)
		}
	})
}
