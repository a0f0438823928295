package apiserver_test

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/pki"
)

const podJSON = `{"apiVersion":"v1","kind":"Pod","metadata":{"name":"p"},"spec":{"containers":[{"name":"c",` +
	`"image":"nginx"}]}}`

// F5: plain HTTP is refused; TLS verifies against the cluster's CA.
func TestPlainHTTPIsRefused(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	conn, err := net.Dial("tcp", r.Addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "GET /api HTTP/1.1\r\nHost: x\r\n\r\n")
	resp := make([]byte, 200)
	n, _ := conn.Read(resp)
	if got := string(resp[:n]); !strings.Contains(got, "400 Bad Request") ||
		!strings.Contains(got, "Client sent an HTTP request to an HTTPS server") {
		t.Errorf("plain HTTP was answered with %q", got)
	}
	if _, err := http.Get("https://" + r.Addr + "/version"); err == nil ||
		!strings.Contains(err.Error(), "certificate") {
		t.Errorf("a client that does not know the CA was served: %v", err)
	}
	if a := r.Call(r.HTTP(nil), "GET", "/version", ""); a.Code != 200 {
		t.Errorf("a client that knows the CA got %d", a.Code)
	}
}

// F6, F9: the documented curl request makes the Deployment, and GET returns its spec.
func TestCreateDeploymentWithBearerToken(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	apiservertest.GrantEdit(t, r, "alice")
	body := `{"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":"hello"},"spec":{"replicas":3,
		"selector":{"matchLabels":{"app":"hello"}},"template":{"metadata":{"labels":{"app":"hello"}},
		"spec":{"containers":[{"name":"hello","image":"nginx:1.27"}]}}}}`
	c := r.HTTP(nil)
	a := r.Call(c, "POST", "/apis/apps/v1/namespaces/default/deployments", body, "Authorization", "Bearer alice-token",
		"Content-Type", "application/json")
	if a.Code != 201 {
		t.Fatalf("create: %d %s", a.Code, a.Body)
	}
	var made, got appsv1.Deployment
	if err := json.Unmarshal([]byte(a.Body), &made); err != nil {
		t.Fatal(err)
	}
	a = r.Call(c, "GET", "/apis/apps/v1/namespaces/default/deployments/hello", "", "Authorization",
		"Bearer alice-token")
	if err := json.Unmarshal([]byte(a.Body), &got); err != nil {
		t.Fatal(err)
	}
	if a.Code != 200 || *got.Spec.Replicas != 3 || got.Spec.Template.Spec.Containers[0].Image != "nginx:1.27" ||
		got.UID != made.UID || got.UID == "" {
		t.Errorf("read back %d %s", a.Code, a.Body)
	}
}

// F7, F50: 201 with uid, resourceVersion and creationTimestamp, and it is in the store by then.
func TestCreatePod(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	c := r.AdminHTTP()
	a := r.Call(c, "POST", "/api/v1/namespaces/default/pods", podJSON)
	if a.Code != 201 || a.Header.Get("Content-Type") != "application/json" {
		t.Fatalf("%d %s %s", a.Code, a.Header.Get("Content-Type"), a.Body)
	}
	var p corev1.Pod
	if err := json.Unmarshal([]byte(a.Body), &p); err != nil {
		t.Fatal(err)
	}
	if p.UID == "" || p.ResourceVersion == "" || p.CreationTimestamp.IsZero() || p.Kind != "Pod" ||
		p.APIVersion != "v1" {
		t.Errorf("%s", a.Body)
	}
	// F56: stored pending and without a node.
	if p.Status.Phase != corev1.PodPending || p.Spec.NodeName != "" {
		t.Errorf("phase %q, node %q", p.Status.Phase, p.Spec.NodeName)
	}
	if fmt.Sprint(uint64(r.Store.Applied())) != p.ResourceVersion {
		t.Errorf("answered with version %s, the store is at %d", p.ResourceVersion, r.Store.Applied())
	}
	apiservertest.Refused(t, r.Call(c, "POST", "/api/v1/namespaces/default/pods", podJSON), 409,
		`pods "p" already exists`)
}

// F8: generateName gives unique names.
func TestGenerateName(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	c := r.Admin()
	seen := map[string]bool{}
	form := regexp.MustCompile(`^nginx-[a-z0-9]{5}$`)
	for range 100 {
		p := apiservertest.NewPod("")
		p.GenerateName = "nginx-"
		got, err := c.CoreV1().Pods("default").Create(apiservertest.Within(t), p, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if !form.MatchString(got.Name) || seen[got.Name] {
			t.Fatalf("name %q", got.Name)
		}
		seen[got.Name] = true
	}
}

// F20, F21, F22, F27: who is who, and nobody is a 401.
func TestAuthentication(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	const pods = "/api/v1/namespaces/default/pods"
	nobody := r.HTTP(nil)
	apiservertest.Refused(t, r.Call(nobody, "GET", pods, ""), 401, "Unauthorized")
	apiservertest.Refused(t, r.Call(nobody, "POST", pods, podJSON), 401, "Unauthorized")
	apiservertest.Refused(t, r.Call(nobody, "GET", pods, "", "Authorization", "Bearer nonsense"), 401,
		"invalid bearer token")
	apiservertest.Refused(t, r.Call(nobody, "GET", "/apis/nothing/v1/things", ""), 401, "Unauthorized")
	for _, open := range []string{"/healthz", "/livez", "/readyz", "/version"} {
		if a := r.Call(nobody, "GET", open, ""); a.Code != 200 {
			t.Errorf("%s for anyone: %d %s", open, a.Code, a.Body)
		}
	}
	whoami := func(c *http.Client, headers ...string) string {
		t.Helper()
		a := r.Call(c, "POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews",
			`{"apiVersion":"authentication.k8s.io/v1","kind":"SelfSubjectReview"}`, headers...)
		if a.Code != 201 {
			t.Fatalf("whoami: %d %s", a.Code, a.Body)
		}
		return a.Body
	}
	cert := r.Cert(pki.Client("donghyun", "dev-team"))
	if got := whoami(r.HTTP(&cert)); !strings.Contains(got, `"username":"donghyun"`) ||
		!strings.Contains(got, `"groups":["dev-team","system:authenticated"]`) {
		t.Errorf("by certificate: %s", got)
	}
	// One bad method does not spoil a good one.
	if got := whoami(r.HTTP(&cert), "Authorization", "Bearer nonsense"); !strings.Contains(got,
		`"username":"donghyun"`) {
		t.Errorf("by certificate beside a bad token: %s", got)
	}
	if got := whoami(nobody, "Authorization", "Bearer alice-token"); !strings.Contains(got, `"username":"alice"`) {
		t.Errorf("by static token: %s", got)
	}
}

// An expired certificate, and one of another CA, is a 401 that says so.
func TestBadCertificates(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	old := pki.Client("donghyun")
	old.Life = time.Hour
	issued, err := r.Trust.CA.Issue(old, time.Now().Add(-2*time.Hour))
	if err != nil {
		t.Skipf("the CA does not issue in the past: %v", err)
	}
	apiservertest.Refused(t, r.Call(r.HTTP(&issued.TLS), "GET", "/api", ""), 401, "certificate has expired")
	other, err := pki.NewTrust("other", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	stranger, err := other.CA.Issue(pki.Client("admin", api.GroupMasters), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	apiservertest.Refused(t, r.Call(r.HTTP(&stranger.TLS), "GET", "/api", ""), 401, "unknown authority")
}

// F39, F38 and the other ways to say something wrong: each a Status that names what is wrong, and
// nothing stored (F44).
func TestBadRequests(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	c := r.AdminHTTP()
	const pods = "/api/v1/namespaces/default/pods"
	before := r.Store.Applied()
	for _, x := range []struct {
		name, method, path, body string
		headers                  []string
		code                     int
		words                    string
	}{
		{"malformed", "POST", pods, `{"apiVersion":`, nil, 400, "unexpected"},
		{"empty", "POST", pods, ``, nil, 400, "empty"},
		{"wrong type", "POST", pods,
			`{"apiVersion":"v1","kind":"Pod","metadata":{"name":"x"},"spec":{"containers":"none"}}`, nil, 400,
			"Pod in version \"v1\" cannot be handled as a Pod"},
		{"wrong quantity", "POST", pods,
			`{"apiVersion":"v1","kind":"Pod","metadata":{"name":"x"},"spec":{"containers":[{"name":"a",` +
				`"resources":{"limits":{"memory":"lots"}}}]}}`, nil, 400,
			`Pod in version "v1" cannot be handled as a Pod: spec.containers[0].resources.limits.memory: Invalid ` +
				`value: "lots": quantities must match`},
		{"wrong YAML", "POST", pods, "apiVersion: v1\nkind: Pod\nspec: {hostNetwork: sometimes}\n",
			[]string{"Content-Type", "application/yaml"}, 400,
			`Pod in version "v1" cannot be handled as a Pod: spec.hostNetwork: Invalid value: "sometimes": must be ` +
				`true or false, not a string`},
		{"wrong kind", "POST", pods, `{"apiVersion":"v1","kind":"Service","metadata":{"name":"x"}}`, nil, 400,
			"cannot be handled as a Pod"},
		{"wrong version", "POST", pods, `{"apiVersion":"apps/v1","kind":"Pod"}`, nil, 400,
			"the API version in the data (apps/v1) does not match the expected API version (v1)"},
		{"no containers", "POST", pods,
			`{"apiVersion":"v1","kind":"Pod","metadata":{"name":"x"},"spec":{"containers":[]}}`, nil, 422,
			"spec.containers: Required value"},
		{"bad name", "POST", pods,
			`{"apiVersion":"v1","kind":"Pod","metadata":{"name":"X_"},"spec":{"containers":[{"name":"c",` +
				`"image":"i"}]}}`, nil, 422, "metadata.name"},
		{"no name", "POST", pods, `{"apiVersion":"v1","kind":"Pod","spec":{"containers":[{"name":"c","image":"i"}]}}`,
			nil, 422, "name or generateName is required"},
		{"unknown field", "POST", pods + "?fieldValidation=Strict",
			strings.Replace(podJSON, `"spec":{`, `"spec":{"flavour":1,`, 1), nil, 400,
			`strict decoding error: unknown field "spec.flavour"`},
		{"duplicate field", "POST", pods + "?fieldValidation=Strict",
			strings.Replace(podJSON, `"spec":{`, `"kind":"Pod","spec":{`, 1), nil, 400, `duplicate field "kind"`},
		{"bad validation", "POST", pods + "?fieldValidation=Loud", podJSON, nil, 422, "fieldValidation"},
		{"bad dry run", "POST", pods + "?dryRun=Maybe", podJSON, nil, 422, "dryRun"},
		{"other namespace", "POST", pods, strings.Replace(podJSON, `"name":"p"`, `"name":"p","namespace":"kube-system"`,
			1), nil, 400, "does not match the namespace"},
		{"missing namespace", "POST", "/api/v1/namespaces/nowhere/pods", podJSON, nil, 404,
			`namespaces "nowhere" not found`},
		{"missing account", "POST", pods, strings.Replace(podJSON, `"spec":{`, `"spec":{"serviceAccountName":"ghost",`,
			1), nil, 403, `pods "p" is forbidden: error looking up service account default/ghost: serviceaccount ` +
			`"ghost" not found`},
		{"missing class", "POST", pods, strings.Replace(podJSON, `"spec":{`, `"spec":{"priorityClassName":"gold",`, 1),
			nil, 403, "no PriorityClass with name gold was found"},
		{"media type", "POST", pods, podJSON, []string{"Content-Type", "text/html"}, 415, "application/json"},
		{"accept", "GET", pods, "", []string{"Accept", "text/html"}, 406, "application/json"},
		{"method", "PUT", pods, podJSON, nil, 405, "not supported"},
		{"method on cluster", "POST", "/api/v1/pods", podJSON, nil, 405, "not supported"},
		{"too large", "POST", pods, strings.Repeat("x", 4<<20), nil, 413, "limit is 3145728"},
		{"no such kind", "GET", "/api/v1/namespaces/default/gadgets", "", nil, 404,
			"the server could not find the requested resource"},
		{"no such group", "GET", "/apis/gadgets.io/v1/gadgets", "", nil, 404,
			"the server could not find the requested resource"},
		{"no such path", "GET", "/nowhere", "", nil, 404, "the server could not find the requested resource"},
		{"no such object", "GET", pods + "/ghost", "", nil, 404, `pods "ghost" not found`},
		{"patch of nothing", "PATCH", pods + "/ghost", `{}`, []string{"Content-Type", "application/merge-patch+json"},
			404, `pods "ghost" not found`},
		{"patch type", "PATCH", pods + "/ghost", `{}`, []string{"Content-Type", "application/json"}, 415,
			"application/merge-patch+json"},
		{"apply without manager", "PATCH", pods + "/ghost", `{}`,
			[]string{"Content-Type", "application/apply-patch+yaml"}, 422, "fieldManager"},
		{"bad selector", "GET", pods + "?labelSelector=a%20b%20c", "", nil, 400, "unable to parse requirement"},
		{"bad limit", "GET", pods + "?limit=many", "", nil, 400, "many"},
		{"bad version", "GET", pods + "?resourceVersion=new", "", nil, 400, "resource"},
		{"watch match", "GET", pods + "?watch=1&resourceVersionMatch=Exact&resourceVersion=1", "", nil, 422,
			"resourceVersionMatch"},
		{"bad delete", "DELETE", pods + "/ghost", `{"propagationPolicy":"Sideways"}`, nil, 422, "propagationPolicy"},
		{"service range", "POST", "/api/v1/namespaces/default/services",
			`{"apiVersion":"v1","kind":"Service","metadata":{"name":"s"},"spec":{"clusterIP":"1.2.3.4",` +
				`"ports":[{"port":80}]}}`, nil, 422,
			"the provided IP (1.2.3.4) is not in the valid range. The range of valid IPs is 10.96.0.0/16"},
		{"port range", "POST", "/api/v1/namespaces/default/services",
			`{"apiVersion":"v1","kind":"Service","metadata":{"name":"s"},"spec":{"type":"NodePort",` +
				`"ports":[{"port":80,"nodePort":80}]}}`, nil, 422,
			"provided port is not in the valid range. The range of valid ports is 30000-32767"},
		{"immortal", "DELETE", "/api/v1/namespaces/kube-system", "", nil, 403, "this namespace may not be deleted"},
	} {
		t.Run(x.name, func(t *testing.T) {
			apiservertest.Refused(t, r.Call(c, x.method, x.path, x.body, x.headers...), x.code, x.words)
		})
	}
	if after := r.Store.Applied(); after != before {
		t.Errorf("refusals changed the store from revision %d to %d", before, after) // F44
	}
}

// Unknown fields are warned about by default and ignored when asked.
func TestFieldValidationWarns(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	c := r.AdminHTTP()
	odd := strings.Replace(podJSON, `"spec":{`, `"spec":{"flavour":1,`, 1)
	a := r.Call(c, "POST", "/api/v1/namespaces/default/pods?dryRun=All", odd)
	if got := a.Header.Get("Warning"); a.Code != 201 || got != `299 - "unknown field \"spec.flavour\""` {
		t.Errorf("%d, warning %q", a.Code, got)
	}
	a = r.Call(c, "POST", "/api/v1/namespaces/default/pods?dryRun=All&fieldValidation=Ignore", odd)
	if got := a.Header.Get("Warning"); a.Code != 201 || got != "" {
		t.Errorf("%d, warning %q", a.Code, got)
	}
	if a = r.Call(c, "GET", "/api/v1/namespaces/default/pods/p", ""); a.Code != 404 {
		t.Errorf("a dry run stored something: %d", a.Code)
	}
}

// F45, F124: a patch starts from what is stored; a stale update is a 409.
func TestUpdatesAndConflicts(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	pods := r.Admin().CoreV1().Pods("default")
	p, err := pods.Create(apiservertest.Within(t), apiservertest.NewPod("p"), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	patched, err := pods.Patch(apiservertest.Within(t), "p", types.StrategicMergePatchType,
		[]byte(`{"metadata":{"labels":{"a":"b"}}}`), metav1.PatchOptions{})
	if err != nil || patched.Labels["a"] != "b" || patched.Spec.Containers[0].Image != "nginx" {
		t.Fatalf("%v %v", err, patched)
	}
	p.Labels = map[string]string{"c": "d"}
	if _, err := pods.Update(apiservertest.Within(t), p, metav1.UpdateOptions{}); !apierrors.IsConflict(err) ||
		!strings.Contains(err.Error(),
			"the object has been modified; please apply your changes to the latest version and try again") {
		t.Errorf("a stale update: %v", err)
	}
	patched.Spec.Hostname = "other"
	if _, err := pods.Update(apiservertest.Within(t), patched, metav1.UpdateOptions{}); !apierrors.IsInvalid(err) ||
		!strings.Contains(err.Error(), "pod updates may not change fields other than") {
		t.Errorf("an update of what may not change: %v", err)
	}
}

// F47 and the wire: protobuf, YAML, tables and metadata only.
func TestRepresentations(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	conf := r.ClientConfig("admin", api.GroupMasters)
	conf.ContentType = "application/vnd.kubernetes.protobuf"
	proto, err := kubernetes.NewForConfig(conf)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := proto.CoreV1().Pods("default").Create(apiservertest.Within(t), apiservertest.NewPod("p"),
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	list, err := proto.CoreV1().Pods("default").List(apiservertest.Within(t), metav1.ListOptions{})
	if err != nil || len(list.Items) != 1 || list.Items[0].Spec.Containers[0].Image != "nginx" ||
		list.ResourceVersion == "" {
		t.Fatalf("%v %+v", err, list)
	}
	c := r.AdminHTTP()
	const pods = "/api/v1/namespaces/default/pods"
	for accept, words := range map[string]string{
		"application/yaml": "kind: PodList",
		"application/json;as=Table;v=v1;g=meta.k8s.io,application/json": `"kind":"Table",` +
			`"apiVersion":"meta.k8s.io/v1"`,
		"application/json;as=Table;v=v1beta1;g=meta.k8s.io":                                `"apiVersion":"meta.k8s.io/v1beta1"`,
		"application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1":                 `"kind":"PartialObjectMetadataList"`,
		"application/json;as=Nonsense;g=meta.k8s.io;v=v1,application/json":                 `"kind":"PodList"`,
		"application/vnd.kubernetes.protobuf;as=Table;g=x;v=v1,application/json;q=0.5,*/*": `"kind":"PodList"`,
	} {
		a := r.Call(c, "GET", pods, "", "Accept", accept)
		if a.Code != 200 || !strings.Contains(a.Body, words) {
			t.Errorf("Accept %s: %d %.300s", accept, a.Code, a.Body)
		}
	}
	a := r.Call(c, "GET", pods+"?includeObject=Object", "", "Accept", "application/json;as=Table;v=v1;g=meta.k8s.io")
	var table metav1.Table
	if err := json.Unmarshal([]byte(a.Body), &table); err != nil || len(table.Rows) != 1 ||
		table.Rows[0].Cells[0] != "p" || !strings.Contains(string(table.Rows[0].Object.Raw), `"image":"nginx"`) {
		t.Errorf("%v %s", err, a.Body)
	}
	a = r.Call(c, "GET", pods+"/p?pretty=true", "")
	if !strings.Contains(a.Body, "\n  \"metadata\": {") {
		t.Errorf("not pretty: %.200s", a.Body)
	}
	// A list of some size is compressed for who can read that.
	for i := range 150 {
		p := apiservertest.NewPod(fmt.Sprintf("p%d", i))
		p.Annotations = map[string]string{"filler": strings.Repeat("x", 1000)}
		r.Must(p)
	}
	if list, err = proto.CoreV1().Pods("").List(apiservertest.Within(t), metav1.ListOptions{}); err != nil ||
		len(list.Items) != 151 {
		t.Errorf("%v, %d items", err, len(list.Items))
	}
	page, err := proto.CoreV1().Pods("default").List(apiservertest.Within(t), metav1.ListOptions{Limit: 100})
	if err != nil || len(page.Items) != 100 || page.Continue == "" || *page.RemainingItemCount != 51 {
		t.Fatalf("%v: %d items, continue %q", err, len(page.Items), page.Continue)
	}
	page, err = proto.CoreV1().Pods("default").List(apiservertest.Within(t),
		metav1.ListOptions{Limit: 100, Continue: page.Continue})
	if err != nil || len(page.Items) != 51 || page.Continue != "" {
		t.Errorf("%v: %d items, continue %q", err, len(page.Items), page.Continue)
	}
}

// Of the Secrets that an account lists, the names are kept alone, whoever writes them; nothing is
// made up for the rest.
func TestSecretsOfServiceAccounts(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	c := r.AdminHTTP()
	const path = "/api/v1/namespaces/default/serviceaccounts"
	const listed = `"secrets":[{"name":"s","namespace":"other","kind":"Secret","uid":"u"},{"name":"t"}]`
	for _, a := range []apiservertest.Response{
		r.Call(c, "POST", path, `{"metadata":{"name":"robot"},`+listed+`}`),
		r.Call(c, "PUT", path+"/robot", `{"metadata":{"name":"robot"},`+listed+`}`),
		r.Call(c, "PATCH", path+"/robot", `{`+listed+`}`, "Content-Type", "application/merge-patch+json"),
	} {
		if !strings.Contains(a.Body, `"secrets":[{"name":"s"},{"name":"t"}]`) ||
			strings.Contains(a.Body, `"automountServiceAccountToken":`) ||
			strings.Contains(a.Body, `"imagePullSecrets":`) {
			t.Errorf("%d %s", a.Code, a.Body)
		}
	}
}
