package clients

import (
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/test/testenv"
)

const wardle = "/apis/wardle.example.com/v1alpha1"

// sampleServer is Kubernetes' sample API server with its etcd in a pod.
type sampleServer struct {
	*testing.T
	ns, etc string
}

func (s sampleServer) runKctl(args ...string) string {
	s.Helper()
	return testenv.Kctl(s, append([]string{"-n", s.ns}, args...)...)
}

func (s sampleServer) tryKctl(args ...string) (string, error) {
	s.Helper()
	return testenv.Try(s, filepath.Join(testenv.Lab().Config.BinDir, "kctl"), append([]string{"-n", s.ns}, args...)...)
}

// applyManifest applies a manifest in the test's namespace.
func (s sampleServer) applyManifest(manifest string) {
	s.Helper()
	s.runKctl("apply", "-f", s.writeFile(manifest))
}

func (s sampleServer) installServer() {
	s.Helper()
	files := map[string]string{}
	err := filepath.WalkDir(s.etc, func(path string, d os.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			files[strings.TrimPrefix(path, s.etc+"/")] = path
		}
		return err
	})
	if err != nil {
		s.Fatal(err)
	}
	testenv.LoadImage(s, "example.com/sample-apiserver:v1",
		map[string]string{"sample-apiserver": clientProgram(s.T, "sample-apiserver")}, "/sample-apiserver")
	testenv.LoadImage(s, "example.com/etcd:v1", files, "/usr/bin/etcd", "--data-dir=/data/etcd")
	cert, key := testCertificate(s.T, fmt.Sprintf("api.%s.svc", s.ns))
	secret := &v1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "wardle-certs"}, Type: v1.SecretTypeTLS,
		Data: map[string][]byte{v1.TLSCertKey: cert, v1.TLSPrivateKeyKey: key}}
	if _, err := testenv.Client(s).CoreV1().Secrets(s.ns).Create(context.Background(), secret,
		metav1.CreateOptions{}); err != nil {
		s.Fatal(err)
	}
	manifest, err := os.ReadFile("testdata/wardle.yaml")
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() {
		if s.Failed() {
			for _, what := range [][]string{
				{"logs", "deployment/wardle-server", "-c", "wardle-server", "--tail=8"},
				{"logs", "deployment/wardle-server", "-c", "etcd", "--tail=10"},
				{"get", "apiservice", "v1alpha1.wardle.example.com", "-o", "yaml"},
			} {
				out, _ := s.tryKctl(what...)
				s.Logf("%s:\n%s", strings.Join(what, " "), out)
			}
		}
		testenv.Kctl(s, "delete", "--ignore-not-found", "apiservice", "v1alpha1.wardle.example.com")
		testenv.Kctl(s, "delete", "--ignore-not-found", "clusterrolebinding", s.ns+":system:auth-delegator",
			s.ns+"-aggregated-apiserver")
		testenv.Kctl(s, "delete", "--ignore-not-found", "clusterrole", s.ns+"-aggregated-apiserver")
		testenv.Kctl(s, "-n", "kube-system", "delete", "--ignore-not-found", "rolebinding", s.ns+"-auth-reader")
	})
	text := strings.ReplaceAll(string(manifest), "caBundle: CA", "caBundle: "+base64.StdEncoding.EncodeToString(cert))
	testenv.Kctl(s, "apply", "-f", s.writeFile(strings.ReplaceAll(text, "NAMESPACE", s.ns))) // of several namespaces
}

// F15: the released sample API server of Kubernetes becomes part of the API. It is in discovery,
// kctl reaches it through every replica, it trusts the user names of the front proxy's certificate,
// and it asks the API to authorize the users. Without its pod it is reported as unavailable;
// without its APIService its group is gone.
func TestSampleAPIServer(t *testing.T) {
	etcd := filepath.Dir(filepath.Dir(filepath.Dir(clientProgram(t, "etcd/usr/bin/etcd"))))
	s := sampleServer{t, testenv.Namespace(t), etcd}
	s.installServer()
	s.runKctl("wait", "--for=condition=Available", "apiservice/v1alpha1.wardle.example.com", "--timeout=180s")
	for _, want := range []string{"flunders", "fischers"} {
		testenv.Eventually(t, soon, func() error { // another replica may fetch the server's discovery slightly later
			out, err := testenv.Try(t, filepath.Join(testenv.Lab().Config.BinDir, "kctl"), "api-resources",
				"--cached=false", "--api-group=wardle.example.com")
			if err == nil && !strings.Contains(out, want) {
				err = fmt.Errorf("%s is not among the resources:\n%s", want, out)
			}
			return err
		})
	}
	s.forEachReplica(func(replica string, cs kubernetes.Interface) { // each replica may receive the request below
		testenv.Eventually(t, soon, func() error {
			_, err := cs.Discovery().ServerResourcesForGroupVersion("wardle.example.com/v1alpha1")
			if err == nil {
				_, err = cs.CoreV1().RESTClient().Get().AbsPath(s.flundersPath("")).DoRaw(context.Background())
			}
			if err != nil {
				return fmt.Errorf("through %s: %w", replica, err)
			}
			return nil
		})
	})
	s.checkVerbs()
	s.checkWatch()
	s.forEachReplica(func(replica string, cs kubernetes.Interface) {
		got, err := cs.CoreV1().RESTClient().Get().AbsPath(s.flundersPath("/first")).DoRaw(context.Background())
		if err != nil || !strings.Contains(string(got), `"name":"first"`) {
			t.Errorf("through %s: %v %s", replica, err, got)
		}
	})
	testenv.Eventually(t, soon, func() error { // each replica asks the server for its documents by itself
		out, err := s.tryKctl("explain", "flunders.spec")
		if err != nil || !strings.Contains(out, "referenceType") {
			return fmt.Errorf("explained as %v\n%s", err, out)
		}
		return nil
	})
	testenv.Eventually(t, soon, func() error {
		got, err := testenv.Client(t).CoreV1().RESTClient().Get().AbsPath("/openapi/v2").SetHeader("Accept",
			"application/json").DoRaw(context.Background())
		if err != nil || !strings.Contains(string(got), `"`+wardle+`/namespaces/{namespace}/flunders"`) {
			return fmt.Errorf("OpenAPI v2 has no flunders: %w (%d bytes)", err, len(got))
		}
		return nil
	})
	s.checkDelegation()
	s.checkOutage()
	s.runKctl("delete", "apiservice", "v1alpha1.wardle.example.com")
	s.forEachReplica(func(replica string, cs kubernetes.Interface) {
		testenv.Eventually(t, soon, func() error {
			groups, err := cs.Discovery().ServerGroups()
			if err == nil && strings.Contains(fmt.Sprint(groups.Groups), "wardle") {
				err = errors.New("the group is still there")
			}
			if err != nil {
				return fmt.Errorf("discovery of %s: %w", replica, err)
			}
			return nil
		})
	})
}

func (s sampleServer) flundersPath(rest string) string {
	return wardle + "/namespaces/" + s.ns + "/flunders" + rest
}

// forEachReplica calls f with a client of each replica.
func (s sampleServer) forEachReplica(f func(replica string, cs kubernetes.Interface)) {
	s.Helper()
	for _, replica := range testenv.Replicas() {
		f(replica, testenv.ClientAt(s, replica))
	}
}

// checkVerbs creates, reads, updates and deletes objects. The server's own admission refuses one of
// them.
func (s sampleServer) checkVerbs() {
	s.Helper()
	const flunder = "apiVersion: wardle.example.com/v1alpha1\nkind: Flunder\nmetadata: {name: %s, labels: {a: b}}\n"
	s.applyManifest(fmt.Sprintf(flunder, "first") + "---\n" + fmt.Sprintf(flunder, "second"))
	if out := s.runKctl("get", "flunders", "-l", "a=b", "-o", "name"); strings.Count(out,
		"flunder.wardle.example.com/") !=
		2 {
		s.Errorf("listed: %s", out)
	}
	s.applyManifest(fmt.Sprintf(flunder, "first") + "spec: {reference: second, referenceType: Flunder}\n")
	s.runKctl("patch", "flunder", "first", "--type=merge", "-p", `{"metadata":{"annotations":{"c":"d"}}}`)
	if got := s.runKctl("get", "flunder", "first", "-o",
		"jsonpath={.spec.reference} {.metadata.annotations.c}"); !strings.HasSuffix(got, "second d") {
		// behind a warning
		s.Errorf("after apply and patch: %q", got)
	}
	s.runKctl("delete", "flunder", "second", "--timeout=180s")
	if out, err := s.tryKctl("get", "flunder", "second"); err == nil ||
		!strings.Contains(out, `flunders.wardle.example.com "second" not found`) {
		s.Errorf("the deleted one: %v %s", err, out)
	}
	s.applyManifest("apiVersion: wardle.example.com/v1alpha1\nkind: Fischer\nmetadata: {name: " + s.ns +
		"}\ndisallowedFlunders: [banned]\n")
	testenv.Eventually(s, soon, func() error { // its watch receives the Fischer slightly later
		out, err := s.tryKctl("create", "--dry-run=server", "-f", s.writeFile(fmt.Sprintf(flunder, "banned")))
		if err == nil || !strings.Contains(out, "this name may not be used, please change the resource name") {
			return fmt.Errorf("not refused by the server's admission: %v %s", err, out)
		}
		return nil
	})
}

func (s sampleServer) writeFile(content string) string {
	file := filepath.Join(s.TempDir(), "f.yaml")
	if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
		s.Fatal(err)
	}
	return file
}

// checkWatch checks that an open watch receives a change.
func (s sampleServer) checkWatch() {
	s.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	defer cancel()
	body, err := testenv.Client(s).CoreV1().RESTClient().Get().AbsPath(s.flundersPath("")).Param("watch", "1").
		// from the server's cache: etcd 3.4 cannot report that the cache is up to date
		Param("resourceVersion", "0").Stream(ctx)
	if err != nil {
		s.Fatal(err)
	}
	defer body.Close()
	s.runKctl("label", "flunder", "first", "seen=by-watch")
	var all strings.Builder
	for buf := make([]byte, 4096); !strings.Contains(all.String(), `"seen":"by-watch"`); {
		n, err := body.Read(buf)
		all.Write(buf[:n])
		if err != nil {
			s.Fatalf("the watch ended: %v after %s", err, all.String())
		}
	}
}

// checkDelegation shows that the server receives the client's identity and asks the API to
// authorize it. The same holds for a direct request with a token that only the API can
// authenticate.
func (s sampleServer) checkDelegation() {
	s.Helper()
	if out, err := s.tryKctl("--as=stranger", "get", "flunders"); err == nil ||
		!strings.Contains(out, `User "stranger" cannot list resource "flunders"`) {
		s.Errorf("a stranger: %v %s", err, out)
	}
	s.runKctl("create", "role", "reader", "--verb=get,list", "--resource=flunders.wardle.example.com")
	s.runKctl("create", "rolebinding", "reader", "--role=reader", "--user=alice", "--serviceaccount="+s.ns+":default")
	testenv.Eventually(s, soon, func() error {
		if out, err := s.tryKctl("--as=alice", "get", "flunder", "first"); err != nil {
			return fmt.Errorf("who may: %w %s", err, out)
		}
		return nil
	})
	testenv.Eventually(s, soon, func() error {
		out, err := s.tryKctl("logs", "deployment/wardle-server", "-c", "wardle-server")
		if err != nil || !strings.Contains(out, `"user":{"username":"alice"`) {
			return fmt.Errorf("the server did not receive the user alice: %v %s", err, out)
		}
		return nil
	})
	pods, err := testenv.Client(s).CoreV1().Pods(s.ns).List(context.Background(),
		metav1.ListOptions{LabelSelector: "apiserver=true"})
	if err != nil || len(pods.Items) == 0 {
		s.Fatal("no pod of the server: ", err)
	}
	for account, code := range map[string]int{"default": 200, "apiserver": 403} {
		var got int
		var said string
		token := s.createToken(account)
		testenv.Eventually(s, soon, func() (err error) {
			got, said, err = requestDirectly(s, &pods.Items[0], s.flundersPath(""), token)
			if err == nil && got != code { // refusals are remembered for a while
				err = fmt.Errorf("%s: %d %s", account, got, said)
			}
			return err
		})
		if code == 403 &&
			!strings.Contains(said, fmt.Sprintf(`User \"system:serviceaccount:%s:%s\" cannot list`, s.ns, account)) {
			s.Errorf("%s is refused by %s", account, said)
		}
	}
}

func (s sampleServer) createToken(account string) string {
	s.Helper()
	r, err := testenv.Client(s).CoreV1().ServiceAccounts(s.ns).CreateToken(context.Background(), account,
		&authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		s.Fatal(err)
	}
	return r.Status.Token
}

// requestDirectly sends a request to the server from its node, without the API.
func requestDirectly(t testing.TB, pod *v1.Pod, path, token string) (int, string, error) {
	c := testenv.HTTP(testenv.Host(t, pod.Spec.NodeName))
	c.Transport.(*http.Transport).TLSClientConfig = &tls.Config{InsecureSkipVerify: true}
	req, err := http.NewRequest(http.MethodGet, "https://"+pod.Status.PodIP+path, nil)
	if err != nil {
		return 0, "", err
	}
	req.Header.Set("Authorization", "Bearer "+token)
	resp, err := c.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(body), err
}

// checkOutage deletes the pod, checks the API meanwhile, and restores the pod.
func (s sampleServer) checkOutage() {
	s.Helper()
	s.runKctl("scale", "deployment/wardle-server", "--replicas=0")
	s.runKctl("wait", "--for=condition=Available=False", "apiservice/v1alpha1.wardle.example.com", "--timeout=180s")
	testenv.Eventually(s, soon, func() error {
		// it may have ended before its endpoint went, and is no more to be reached first
		got, err := s.tryKctl("get", "apiservice", "v1alpha1.wardle.example.com", "-o",
			`jsonpath={.status.conditions[?(@.type=="Available")].reason}`)
		if got != "MissingEndpoints" {
			err = fmt.Errorf("unavailable because of %q (%v)", got, err)
		}
		return err
	})
	s.forEachReplica(func(replica string, cs kubernetes.Interface) {
		testenv.Eventually(s, soon, func() error {
			_, err := cs.CoreV1().RESTClient().Get().AbsPath(s.flundersPath("")).DoRaw(context.Background())
			var status apierrors.APIStatus
			if !apierrors.IsServiceUnavailable(err) || !errors.As(err, &status) ||
				!strings.Contains(fmt.Sprint(status.Status().Details), "service unavailable") {
				return fmt.Errorf("%s answers %w", replica, err)
			}
			return nil
		})
		if _, err := cs.CoreV1().Pods(s.ns).List(context.Background(), metav1.ListOptions{}); err != nil {
			s.Errorf("and pods: %v", err)
		}
	})
	s.runKctl("scale", "deployment/wardle-server", "--replicas=1")
	s.runKctl("wait", "--for=condition=Available", "apiservice/v1alpha1.wardle.example.com", "--timeout=180s")
	testenv.Eventually(s, soon, func() error { // a replica may receive the pod later than the replica that reported it
		out, err := s.tryKctl("get", "flunders")
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
}
