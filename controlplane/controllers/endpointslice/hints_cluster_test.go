package endpointslice_test

import (
	"fmt"
	"slices"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
)

// zones are the zones for which the endpoints of a Service are, sorted; "" for one without a hint.
func zones(w *testcluster.Cluster, service string) []string {
	w.T.Helper()
	list, err := client.List[*discoveryv1.EndpointSlice](w.Ctx, w.Admin, "default",
		metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=" + service})
	if err != nil {
		w.T.Fatal(err)
	}
	var out []string
	for _, s := range list {
		for _, e := range s.Endpoints {
			zone := ""
			if e.Hints != nil {
				zone = e.Hints.ForZones[0].Name
			}
			out = append(out, zone)
		}
	}
	slices.Sort(out)
	return out
}

// F116: hints follow the Service's wish and the nodes' zones, through a change of leadership too, and then nothing more is written.
func TestHintsFollowNodes(t *testing.T) {
	w := testcluster.New(t, testcluster.Options{NoMutationGuard: true})
	stop := w.Lead(engine.Options{})
	for name, zone := range map[string]string{"w1": "a", "w2": "b"} {
		w.AddNode(name)
		testcluster.Update(w, name, func(n *corev1.Node) {
			metav1.SetMetaDataLabel(&n.ObjectMeta, corev1.LabelTopologyZone, zone)
		})
		w.Eventually("telling of CPUs", func() error {
			n, err := client.Get[*corev1.Node](w.Ctx, w.Admin, "", name)
			if err != nil {
				return err
			}
			n = n.DeepCopy()
			n.Status.Allocatable = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("4")}
			_, err = client.UpdateStatus(w.Ctx, w.Admin, n)
			return err
		})
	}
	w.AwaitUsableNodes(2)
	w.CreateObject(testcluster.NewDeployment("web", 12, "web:1"))
	w.AwaitRollout("web", 12)
	// After its pods: hints that were given while some were not ready stay as long as no zone has much too few.
	svc := testcluster.NewService("web")
	svc.Annotations = map[string]string{corev1.AnnotationTopologyMode: "Auto"}
	w.CreateObject(svc)
	hinted := func(what string, want map[string]int) {
		t.Helper()
		w.Eventually(what, func() error {
			got := map[string]int{}
			for _, z := range zones(w, "web") {
				got[z]++
			}
			if fmt.Sprint(got) != fmt.Sprint(want) {
				return fmt.Errorf("endpoints by zone %v, want %v", got, want)
			}
			return nil
		})
	}
	hinted("halves", map[string]int{"a": 6, "b": 6})
	stop()
	testcluster.Update(w, "w2", func(n *corev1.Node) { delete(n.Labels, corev1.LabelTopologyZone) })
	stop = w.Lead(engine.Options{})
	defer func() { stop() }()
	hinted("a node without a zone", map[string]int{"": 12})
	testcluster.Update(w, "w2", func(n *corev1.Node) {
		metav1.SetMetaDataLabel(&n.ObjectMeta, corev1.LabelTopologyZone, "c")
	})
	hinted("another zone", map[string]int{"a": 6, "c": 6})
	testcluster.Update(w, "web", func(s *corev1.Service) { s.Annotations = nil })
	hinted("no wish", map[string]int{"": 12})
	how := corev1.ServiceTrafficDistributionPreferSameZone
	testcluster.Update(w, "web", func(s *corev1.Service) { s.Spec.TrafficDistribution = &how })
	w.Eventually("each for its own zone", func() error {
		if got := zones(w, "web"); len(got) != 12 || slices.Contains(got, "") {
			return fmt.Errorf("zones %v", got)
		}
		return nil
	})
	testcluster.Update(w, "web", func(d *appsv1.Deployment) { n := int32(3); d.Spec.Replicas = &n })
	w.AwaitRollout("web", 3)
	w.AwaitRest()
}
