package noderestriction_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/pki"
)

// nodeRequest is a request of a node; media is the type of its body.
type nodeRequest struct{ method, path, media, body string }

func (a nodeRequest) headers() []string {
	if a.media == "" {
		return nil
	}
	return []string{"Content-Type", a.media}
}

const (
	merge, apply, js = "application/merge-patch+json", "application/apply-patch+yaml", "application/json"
	pods, core       = "/api/v1/namespaces/default/pods/", "/api/v1/"
	leases, csinodes = "/apis/coordination.k8s.io/v1/namespaces/", "/apis/storage.k8s.io/v1/csinodes"
)

// F32: a node with a valid certificate is denied everything beyond its own objects: other nodes'
// objects, other pods' secrets and tokens, other users' names, and indirect ways to reach them.
func TestHostileNode(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	for _, name := range []string{"a", "b"} {
		r.Must(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name,
			Labels: map[string]string{"node-restriction.kubernetes.io/team": "red"}}})
		r.Must(&coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-node-lease", Name: name}})
		r.Must(&storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: name}})
	}
	r.Must(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "crown"}})
	own, other := r.CreatePodOn("own", "a"), r.CreatePodOn("other", "b")
	claimDevices(r)
	cert := r.Cert(pki.Client(api.NodeUserPrefix+"a", api.GroupNodes))
	node := r.HTTP(&cert)
	for _, a := range slices.Concat(attemptsOnNodes, attemptsOnSecrets, attemptsOnPods, attemptsOnDevices,
		attemptsOnTokens(own, other)) {
		if got := r.Call(node, a.method, a.path, a.body, a.headers()...); got.Code != 403 {
			t.Errorf("%s %s %s: %d %.200s", a.method, a.path, a.body, got.Code, got.Body)
		}
	}
	for what, headers := range map[string][]string{
		"a user":  {"Impersonate-User", "admin"},
		"a group": {"Impersonate-User", "x", "Impersonate-Group", api.GroupMasters},
		"itself":  {"Impersonate-User", api.NodeUserPrefix + "a", "Impersonate-Group", api.GroupMasters},
		"a uid":   {"Impersonate-User", api.NodeUserPrefix + "a", "Impersonate-Uid", "u"},
		"extra":   {"Impersonate-User", api.NodeUserPrefix + "a", "Impersonate-Extra-Scopes", "all"},
	} {
		if got := r.Call(node, "GET", core+"nodes/a", "", headers...); got.Code != 403 {
			t.Errorf("impersonating %s: %d %.200s", what, got.Code, got.Body)
		}
	}
	// What it may do, it can.
	for _, a := range ownWork {
		got := r.Call(node, a.method, a.path, a.body, a.headers()...)
		if got.Code >= 300 || strings.Contains(got.Body, "crown") || strings.Contains(got.Body, "example.com/never\"") {
			t.Errorf("%s %s: %d %.200s", a.method, a.path, got.Code, got.Body)
		}
	}
}

var attemptsOnNodes = []nodeRequest{
	// Other nodes' objects.
	{"GET", core + "nodes/b", "", ""},
	{"GET", core + "nodes", "", ""},
	{"PATCH", core + "nodes/b", merge, `{"metadata":{"labels":{"x":"y"}}}`},
	{"PATCH", core + "nodes/b/status", merge, `{"status":{"phase":"x"}}`},
	{"PATCH", core + "nodes/c?fieldManager=m", apply, `{"apiVersion":"v1","kind":"Node","metadata":{"name":"c"}}`},
	{"POST", core + "nodes", js, `{"apiVersion":"v1","kind":"Node","metadata":{"name":"c"}}`},
	{"POST", core + "nodes", js, `{"apiVersion":"v1","kind":"Node","metadata":{"generateName":"a"}}`},
	{"DELETE", core + "nodes/a", "", ""},
	{"DELETE", core + "nodes/b", "", ""},
	{"GET", leases + "kube-node-lease/leases/b", "", ""},
	{"GET", leases + "kube-node-lease/leases", "", ""},
	{"PATCH", leases + "kube-node-lease/leases/b", merge, `{"spec":{"holderIdentity":"a"}}`},
	{"DELETE", leases + "kube-node-lease/leases/b", "", ""},
	{"POST", leases + "kube-node-lease/leases", js, `{"metadata":{"name":"c"}}`},
	{"POST", leases + "default/leases", js, `{"metadata":{"name":"a"}}`},
	{"GET", csinodes + "/b", "", ""},
	{"PATCH", csinodes + "/b", merge, `{"metadata":{"labels":{"x":"y"}}}`},
	{"POST", csinodes, js, `{"metadata":{"name":"c"}}`},
	{"DELETE", csinodes, "", ""},
	// Its own Node, but for what it may not say of itself.
	{"PATCH", core + "nodes/a", merge, `{"metadata":{"labels":{"node-restriction.kubernetes.io/team":"blue"}}}`},
	{"PATCH", core + "nodes/a", merge, `{"metadata":{"labels":{"node-restriction.kubernetes.io/team":null}}}`},
	{"PATCH", core + "nodes/a/status", merge, `{"metadata":{"labels":{"node-restriction.kubernetes.io/team":"blue"}}}`},
	{"PATCH", core + "nodes/a", merge,
		`{"metadata":{"annotations":{"keelson.dev/cluster-file":"{\"taints\":[\"quarantine:NoExecute\"]}"}}}`},
	{"PATCH", core + "nodes/a/status", merge, `{"metadata":{"annotations":{"keelson.dev/upgrade-drain":"drained"}}}`},
	{"PATCH", core + "nodes/a", merge, `{"metadata":{"labels":{"node-role.kubernetes.io/control-plane":""}}}`},
	{"PATCH", core + "nodes/a", merge, `{"spec":{"taints":[{"key":"k","effect":"NoSchedule"}]}}`},
	{"PATCH", core + "nodes/a", merge,
		`{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"Node","name":"b","uid":"u"}]}}`},
	{"PATCH", core + "nodes/a", merge, `{"metadata":{"finalizers":["example.com/never"]}}`},
	{"PATCH", core + "nodes/a/status", merge, `{"metadata":{"finalizers":["example.com/never"]}}`},
	{"PATCH", core + "nodes/a/status", merge,
		`{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"Node","name":"b","uid":"u"}]}}`},
	{"PATCH", core + "nodes/a", merge, `{"spec":{"podCIDR":"10.96.0.0/16","podCIDRs":["10.96.0.0/16"]}}`},
}

var attemptsOnSecrets = []nodeRequest{
	// What its pods do not refer to.
	{"GET", core + "secrets", "", ""},
	{"GET", core + "namespaces/default/secrets", "", ""},
	{"GET", core + "namespaces/default/secrets/crown", "", ""},
	{"GET", core + "namespaces/default/secrets/other-secret", "", ""},
	{"GET", core + "namespaces/default/secrets?fieldSelector=metadata.name%3Dcrown", "", ""},
	{"GET", core + "namespaces/default/secrets?fieldSelector=metadata.name!%3Down-secret", "", ""},
	{"GET", core + "namespaces/default/secrets?fieldSelector=metadata.name%3Down-secret,metadata.name%3Dcrown", "", ""},
	{"GET", core + "secrets?watch=true&fieldSelector=metadata.name%3Down-secret", "", ""},
	{"GET", core + "namespaces/kube-system/secrets/own-secret", "", ""},
	{"PATCH", core + "namespaces/default/secrets/own-secret", merge, `{"data":{}}`},
	{"DELETE", core + "namespaces/default/secrets/own-secret", "", ""},
	{"GET", core + "persistentvolumes", "", ""},
	{"GET", "/apis/rbac.authorization.k8s.io/v1/clusterroles", "", ""},
}

var attemptsOnPods = []nodeRequest{
	// Pods.
	{"GET", core + "pods", "", ""},
	{"GET", core + "pods?fieldSelector=spec.nodeName%3Db", "", ""},
	{"GET", core + "pods?fieldSelector=spec.nodeName!%3Da", "", ""},
	{"GET", pods + "other", "", ""},
	{"GET", pods + "other/log", "", ""},
	{"DELETE", pods + "other", "", ""},
	{"DELETE", core + "namespaces/default/pods?fieldSelector=spec.nodeName%3Da", "", ""},
	{"POST", pods + "other/eviction", js, `{"apiVersion":"policy/v1","kind":"Eviction","metadata":{"name":"other"}}`},
	{"PATCH", pods + "other/status", merge, `{"status":{"phase":"Failed"}}`},
	{"PATCH", pods + "own", merge, `{"spec":{"containers":[{"name":"c","image":"evil"}]}}`},
	{"PATCH", pods + "own/status", merge, `{"metadata":{"labels":{"app":"bank"}}}`},
	{"PATCH", pods + "own/status", merge, `{"metadata":{"finalizers":["example.com/never"]}}`},
	{"PATCH", pods + "own/ephemeralcontainers", merge,
		`{"spec":{"ephemeralContainers":[{"name":"e","image":"i","envFrom":[{"secretRef":{"name":"crown"}}]}]}}`},
	{"PATCH", pods + "own/resize", merge, `{"spec":{"containers":[{"name":"c"}]}}`},
	{"POST", pods + "own/binding", js,
		`{"apiVersion":"v1","kind":"Binding","metadata":{"name":"own"},"target":{"kind":"Node","name":"b"}}`},
	{"POST", pods + "own/exec?command=sh", "", ""},
	{"GET", pods + "own/exec?command=sh", "", ""},
	{"POST", pods + "own/portforward", "", ""},
	{"POST", core + "namespaces/default/pods", js,
		`{"apiVersion":"v1","kind":"Pod","metadata":{"name":"n"},"spec":{"nodeName":"a","containers":[{"name":"c",` +
			`"image":"i"}]}}`},
	{"PATCH", pods + "n?fieldManager=m", apply,
		`{"apiVersion":"v1","kind":"Pod","metadata":{"name":"n"},"spec":{"nodeName":"a","containers":[{"name":"c",` +
			`"image":"i"}]}}`},
	{"POST", core + "namespaces/default/pods", js,
		`{"apiVersion":"v1","kind":"Pod","metadata":{"name":"n","annotations":{"kubernetes.io/config.mirror":"x"}},` +
			`"spec":{"nodeName":"b","containers":[{"name":"c","image":"i"}]}}`},
	{"POST", core + "namespaces/default/pods", js,
		`{"apiVersion":"v1","kind":"Pod","metadata":{"name":"n","annotations":{"kubernetes.io/config.mirror":"x"}},` +
			`"spec":{"nodeName":"a","serviceAccountName":"default","containers":[{"name":"c","image":"i"}]}}`},
	{"POST", core + "namespaces/default/pods", js,
		`{"apiVersion":"v1","kind":"Pod","metadata":{"name":"n","annotations":{"kubernetes.io/config.mirror":"x"},` +
			`"finalizers":["example.com/never"]},"spec":{"nodeName":"a","containers":[{"name":"c","image":"i"}]}}`},
}

// claimDevices creates ResourceClaims, one of which pod "user" of node a uses, and ResourceSlices
// of both nodes.
func claimDevices(r *apiservertest.Replica) {
	for _, name := range []string{"own-claim", "other-claim"} {
		r.Must(&resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
			Spec: resourcev1.ResourceClaimSpec{
				Devices: resourcev1.DeviceClaim{Requests: []resourcev1.DeviceRequest{{Name: "r",
					Exactly: &resourcev1.ExactDeviceRequest{DeviceClassName: "c"}}}}}})
	}
	for _, node := range []string{"a", "b"} {
		r.Must(&resourcev1.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: node},
			Spec: resourcev1.ResourceSliceSpec{Driver: "d.example.com", NodeName: &node,
				Pool: resourcev1.ResourcePool{Name: node, ResourceSliceCount: 1}}})
	}
	claim, template := "own-claim", "t"
	r.Must(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "user"},
		Spec: corev1.PodSpec{NodeName: "a",
			Containers: []corev1.Container{{Name: "c", Image: "i"}}, ResourceClaims: []corev1.PodResourceClaim{
				{Name: "c", ResourceClaimName: &claim}, {Name: "t", ResourceClaimTemplateName: &template}}}})
}

const claims, deviceSlices = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims",
	"/apis/resource.k8s.io/v1/resourceslices"

func sliceOf(node string) string {
	return fmt.Sprintf(`{"apiVersion":"resource.k8s.io/v1","kind":"ResourceSlice","metadata":{"name":"more"},`+
		`"spec":{"driver":"d.example.com","nodeName":%q,`+
		`"pool":{"name":"more","generation":0,"resourceSliceCount":1}}}`, node)
}

var attemptsOnDevices = []nodeRequest{
	{"GET", claims, "", ""},
	{"GET", claims + "/other-claim", "", ""},
	{"PATCH", claims + "/own-claim", merge, `{"metadata":{"labels":{"x":"y"}}}`},
	{"PATCH", claims + "/own-claim/status", merge, `{"status":{"reservedFor":[]}}`},
	{"PATCH", pods + "user/status", merge,
		`{"status":{"resourceClaimStatuses":[{"name":"t","resourceClaimName":"other-claim"}]}}`},
	{"GET", deviceSlices, "", ""},
	{"GET", deviceSlices + "?fieldSelector=spec.nodeName%3Db", "", ""},
	{"GET", deviceSlices + "/b", "", ""},
	{"POST", deviceSlices, js, sliceOf("b")},
	{"PATCH", deviceSlices + "/b", merge, `{"metadata":{"labels":{"x":"y"}}}`},
	{"DELETE", deviceSlices + "/b", "", ""},
	{"DELETE", deviceSlices, "", ""},
}

func attemptsOnTokens(own, other *corev1.Pod) []nodeRequest {
	token := func(ref string) string {
		return `{"apiVersion":"authentication.k8s.io/v1","kind":"TokenRequest","spec":{"audiences":["x"],` +
			`"boundObjectRef":` + ref + `}}`
	}
	bound := func(kind, version string, p *corev1.Pod) string {
		return token(fmt.Sprintf(`{"kind":%q,"apiVersion":%q,"name":%q,"uid":%q}`, kind, version, p.Name, p.UID))
	}
	const accounts = "/api/v1/namespaces/default/serviceaccounts/default/token"
	return []nodeRequest{
		// Tokens.
		{"POST", accounts, js, bound("Pod", "v1", other)},
		{"POST", accounts, js, bound("Secret", "v1", own)},
		{"POST", accounts, js, bound("Pod", "apps/v1", own)},
		{"POST", accounts, js, bound("Pod", "v1", own)}, // for an audience that it does not name
		{"POST", accounts, js, token("null")},
		{"POST", "/api/v1/namespaces/kube-system/serviceaccounts/default/token", js, bound("Pod", "v1", own)},
	}
}

var ownWork = []nodeRequest{
	{"GET", core + "nodes/a", "", ""},
	{"PATCH", core + "nodes/a/status", merge, `{"status":{"phase":"Running"}}`},
	{"GET", core + "namespaces/default/secrets/own-secret", "", ""},
	{"GET", core + "namespaces/default/secrets?fieldSelector=metadata.name%3Down-secret", "", ""},
	{"GET", core + "pods?fieldSelector=spec.nodeName%3Da", "", ""},
	{"PATCH", pods + "own/status", merge, `{"status":{"phase":"Running"}}`},
	// ignored
	{"PATCH", pods + "own/status", merge,
		`{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"Node","name":"example.com/never","uid":"u"}]}}`},
	{"POST", pods + "own/eviction", js, `{"apiVersion":"policy/v1","kind":"Eviction","metadata":{"name":"own"}}`},
	{"GET", claims + "/own-claim", "", ""},
	{"POST", deviceSlices, js, sliceOf("a")},
	{"GET", deviceSlices + "?fieldSelector=spec.nodeName%3Da", "", ""},
	{"PATCH", deviceSlices + "/a", merge, `{"metadata":{"labels":{"x":"y"}}}`},
	{"DELETE", deviceSlices + "/a", "", ""},
}
