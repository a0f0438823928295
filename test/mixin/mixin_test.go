package mixin_test

import (
	"context"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"keelson.dev/keelson/controlplane/server/servertest"
	"keelson.dev/keelson/test/mixin"
)

// Every row of the list is complete and unique, and none is of an excluded component.
func TestSeriesList(t *testing.T) {
	word := regexp.MustCompile(`^[a-z_][a-zA-Z0-9_]*$`)
	use := regexp.MustCompile(`^(rules|alert|dashboards?|scrape) [^\s].*$`)
	excluded := regexp.MustCompile(`(?i)^(etcd_|windows_|apiserver_flowcontrol_)`)
	sources := []string{mixin.SourceAPIServer, mixin.SourceScheduler, mixin.SourceControllerManager, "kubelet",
		"cadvisor", "kube-proxy", "kube-state-metrics", "node-exporter"}
	seen := map[string]bool{}
	for _, s := range mixin.Read() {
		if !slices.Contains(sources, s.Source) || !word.MatchString(s.Metric) || excluded.MatchString(s.Metric) {
			t.Errorf("metric %q of %q", s.Metric, s.Source)
		}
		for _, label := range s.Labels {
			if !word.MatchString(label) {
				t.Errorf("%s has label %q", s.Metric, label)
			}
		}
		if strings.HasSuffix(s.Metric, "_bucket") != slices.Contains(s.Labels, "le") {
			t.Errorf("%s has labels %v", s.Metric, s.Labels)
		}
		for _, serves := range s.Serves {
			if !use.MatchString(serves) {
				t.Errorf("%s serves %q", s.Metric, serves)
			}
		}
		if row := s.Source + " " + s.Metric; seen[row] {
			t.Errorf("%s is there twice", row)
		} else {
			seen[row] = true
		}
	}
	s := mixin.Series{Metric: "m_bucket", Labels: []string{"verb", "le"}}
	if got := s.Selector(); got != `m_bucket{verb!="",le!=""}` {
		t.Errorf("selector %s", got)
	}
}

// F133: a replica has every series that kubernetes-mixin reads from the API server, the scheduler
// and the controller manager, with its labels.
func TestControlPlaneSeries(t *testing.T) {
	p := servertest.NewPlane(t, 1, nil)
	sendRequests(t, p)
	schedulePod(t, p)
	var missing []string
	servertest.Eventually(t, func() error {
		var page string
		if err := p.Call("cp1", "GET", "/metrics", nil, &page); err != nil {
			return err
		}
		exposed := readSamples(page)
		missing = nil
		for _, s := range mixin.Read() {
			if slices.Contains([]string{mixin.SourceAPIServer, mixin.SourceScheduler, mixin.SourceControllerManager},
				s.Source) && s.Metric != "up" && !hasLabels(exposed[s.Metric], s.Labels) {
				missing = append(missing, s.Source+": "+s.Selector())
			}
		}
		if len(missing) > 0 {
			return fmt.Errorf("not exposed:\n%s", strings.Join(missing, "\n"))
		}
		return nil
	})
}

// sendRequests sends a request for a subresource, a request that ends at its deadline, and creates
// an APIService without a server.
func sendRequests(t *testing.T, p *servertest.Plane) {
	t.Helper()
	if err := p.Call("cp1", "GET", "/api/v1/namespaces/default/status", nil, nil); err != nil {
		t.Fatal(err)
	}
	cfg := p.RESTConfig("cp1")
	client, err := rest.HTTPClientFor(cfg)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client.Post(cfg.Host+"/api/v1/namespaces/default/configmaps?timeout=1ns", "application/json",
		strings.NewReader(`{"metadata":{"name":"late"}}`))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusGatewayTimeout {
		t.Fatalf("a request with a timeout of a nanosecond: %s", resp.Status)
	}
	if err := p.Call("cp1", "POST", "/apis/apiregistration.k8s.io/v1/apiservices", map[string]any{
		"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService",
		"metadata": map[string]any{"name": "v1.absent.example.com"},
		"spec": map[string]any{"group": "absent.example.com", "version": "v1", "insecureSkipTLSVerify": true,
			"groupPriorityMinimum": 100, "versionPriority": 100,
			"service": map[string]any{"namespace": "default", "name": "absent"}},
	}, nil); err != nil {
		t.Fatal(err)
	}
}

// schedulePod creates a node, and a pod with a volume that is bound when the pod is scheduled.
func schedulePod(t *testing.T, p *servertest.Plane) {
	t.Helper()
	cs, ctx, create := p.Client("cp1"), context.Background(), metav1.CreateOptions{}
	node, err := cs.CoreV1().Nodes().Create(ctx, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1",
		Labels: map[string]string{v1.LabelHostname: "w1"}}}, create)
	if err != nil {
		t.Fatal(err)
	}
	size := v1.ResourceList{v1.ResourceStorage: resource.MustParse("1Gi")}
	node.ResourceVersion = "" // the node may have been changed by a controller
	node.Status.Capacity = v1.ResourceList{v1.ResourcePods: resource.MustParse("10"),
		v1.ResourceCPU: resource.MustParse("4"), v1.ResourceMemory: resource.MustParse("4Gi")}
	node.Status.Allocatable = node.Status.Capacity
	node.Status.Conditions = []v1.NodeCondition{{Type: v1.NodeReady, Status: v1.ConditionTrue,
		LastHeartbeatTime: metav1.Now(), LastTransitionTime: metav1.Now()}}
	if _, err := cs.CoreV1().Nodes().UpdateStatus(ctx, node, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	late, class := storagev1.VolumeBindingWaitForFirstConsumer, "late"
	if _, err := cs.StorageV1().StorageClasses().Create(ctx, &storagev1.StorageClass{
		ObjectMeta:  metav1.ObjectMeta{Name: class},
		Provisioner: "kubernetes.io/no-provisioner", VolumeBindingMode: &late}, create); err != nil {
		t.Fatal(err)
	}
	if _, err := cs.CoreV1().PersistentVolumes().Create(ctx, &v1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: "v"},
		Spec: v1.PersistentVolumeSpec{Capacity: size, StorageClassName: class,
			AccessModes: []v1.PersistentVolumeAccessMode{v1.ReadWriteOnce},
			PersistentVolumeSource: v1.PersistentVolumeSource{
				HostPath: &v1.HostPathVolumeSource{Path: "/srv/v"}}}}, create); err != nil {
		t.Fatal(err)
	}
	if _, err := cs.CoreV1().PersistentVolumeClaims("default").Create(ctx, &v1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: "c"},
		Spec: v1.PersistentVolumeClaimSpec{StorageClassName: &class,
			AccessModes: []v1.PersistentVolumeAccessMode{v1.ReadWriteOnce},
			Resources:   v1.VolumeResourceRequirements{Requests: size}}}, create); err != nil {
		t.Fatal(err)
	}
	if _, err := cs.CoreV1().Pods("default").Create(ctx, &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p"},
		Spec: v1.PodSpec{
			Containers:  []v1.Container{{Name: "app", Image: "registry.example.com/app:v1"}},
			Tolerations: []v1.Toleration{{Operator: v1.TolerationOpExists}},
			Volumes: []v1.Volume{{Name: "data", VolumeSource: v1.VolumeSource{
				PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{ClaimName: "c"}}}}}}, create); err != nil {
		t.Fatal(err)
	}
}

// sample matches a line of the text format and the pairs of its labels.
var (
	sample = regexp.MustCompile(`(?m)^([a-z_][a-zA-Z0-9_]*)(\{.*\})? \S+$`)
	pair   = regexp.MustCompile(`([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"`)
)

// readSamples returns, by name, the labels of each sample of a page in the text format.
func readSamples(page string) map[string][]map[string]string {
	exposed := map[string][]map[string]string{}
	for _, found := range sample.FindAllStringSubmatch(page, -1) {
		labels := map[string]string{}
		for _, p := range pair.FindAllStringSubmatch(found[2], -1) {
			labels[p[1]] = p[2]
		}
		exposed[found[1]] = append(exposed[found[1]], labels)
	}
	return exposed
}

// hasLabels reports whether a sample has a value for each of the labels.
func hasLabels(samples []map[string]string, labels []string) bool {
	return slices.ContainsFunc(samples, func(s map[string]string) bool {
		return !slices.ContainsFunc(labels, func(label string) bool { return s[label] == "" })
	})
}
