package clients

import (
	"context"
	"encoding/base64"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/test/testenv"
)

// webhook is one webhook of a configuration. It applies to the namespaces that selector selects.
type webhook struct {
	name string // of several
	url  string // or a path of the pods of servers
	path string
	from *webhookServers
	ca   []byte // of url

	selector string // YAML; "" = the test's namespace alone
	rules    string // YAML
	more     string // fields in YAML, a line
}

func (h webhook) toYAML(ns string) string {
	client := fmt.Sprintf("{url: %q, caBundle: %s}", h.url, base64.StdEncoding.EncodeToString(h.ca))
	if h.from != nil {
		client = fmt.Sprintf("{service: {namespace: %s, name: hooks, path: %s}, caBundle: %s}", h.from.ns, h.path,
			base64.StdEncoding.EncodeToString(h.from.ca))
	}
	if h.selector == "" {
		h.selector = "{matchLabels: {kubernetes.io/metadata.name: " + ns + "}}"
	}
	if h.name == "" {
		h.name = "hook"
	}
	return fmt.Sprintf("- name: %s.%s.example.com\n  admissionReviewVersions: [v1]\n  sideEffects: None\n  "+
		"timeoutSeconds: 30\n"+
		"  namespaceSelector: %s\n  rules: %s\n  clientConfig: %s\n  %s\n", h.name, ns, h.selector, h.rules,
		client, h.more)
}

// installValidating installs a ValidatingWebhookConfiguration until the test ends.
func installValidating(t testing.TB, ns, name string, hooks ...webhook) {
	t.Helper()
	installWebhooks(t, "ValidatingWebhookConfiguration", ns, name, hooks)
}

// installMutating installs a MutatingWebhookConfiguration until the test ends.
func installMutating(t testing.TB, ns, name string, hooks ...webhook) {
	t.Helper()
	installWebhooks(t, "MutatingWebhookConfiguration", ns, name, hooks)
}

func installWebhooks(t testing.TB, kind, ns, name string, hooks []webhook) {
	t.Helper()
	text := fmt.Sprintf("apiVersion: admissionregistration.k8s.io/v1\nkind: %s\nmetadata: {name: %s.%s}\nwebhooks:\n",
		kind, name, ns)
	for _, h := range hooks {
		text += h.toYAML(ns)
	}
	testenv.Kctl(t, "apply", "-f", writeManifest(t, text))
	t.Cleanup(func() { testenv.Kctl(t, "delete", kind, name+"."+ns) })
}

// writeManifest writes a manifest to a file and returns its path.
func writeManifest(t testing.TB, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "m.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// webhookServers is a Deployment of the webhook of this folder, and a Service, in their own
// namespace.
type webhookServers struct {
	testing.TB
	ns string
	ca []byte // the certificate of the Service, in PEM
}

var loadHooks sync.Mutex // the image is made by whoever comes first
var hooksLoaded bool

// installWebhookServers creates this number of pods of the webhook and waits for them.
func installWebhookServers(t testing.TB, replicas int) *webhookServers {
	t.Helper()
	loadHooks.Lock()
	if !hooksLoaded {
		testenv.LoadImage(t, "example.com/hooks:v1",
			map[string]string{"hooks": filepath.Join(testenv.Build(t, "keelson.dev/keelson/test/e2e/clients/hooks"),
				"hooks")}, "/hooks")
		hooksLoaded = true
	}
	loadHooks.Unlock()
	s := &webhookServers{TB: t, ns: testenv.Namespace(t)}
	cert, key := testCertificate(t, fmt.Sprintf("hooks.%s.svc", s.ns))
	s.ca = cert
	secret := &v1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "hooks-certs"}, Type: v1.SecretTypeTLS,
		Data: map[string][]byte{v1.TLSCertKey: cert, v1.TLSPrivateKeyKey: key}}
	if _, err := testenv.Client(t).CoreV1().Secrets(s.ns).Create(context.Background(), secret,
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	s.applyFile("testdata/hooks.yaml", "REPLICAS", fmt.Sprint(replicas))
	s.runKctl("rollout", "status", "deployment/hooks", "--timeout=180s")
	awaitEndpoints(t, s.ns, "hooks", replicas)
	return s
}

// awaitEndpoints waits until every replica has this number of ready endpoints of a Service. The
// Deployment may report completion slightly earlier.
func awaitEndpoints(t testing.TB, ns, service string, pods int) {
	t.Helper()
	for _, replica := range testenv.Replicas() {
		slices := testenv.ClientAt(t, replica).DiscoveryV1().EndpointSlices(ns)
		testenv.Eventually(t, soon, func() error {
			// It uses its own informers to select webhooks.
			list, err := slices.List(context.Background(),
				metav1.ListOptions{ResourceVersion: "0", LabelSelector: discoveryv1.LabelServiceName + "=" + service})
			if err != nil {
				return err
			}
			ready := 0
			for _, s := range list.Items {
				for _, e := range s.Endpoints {
					if e.Conditions.Ready != nil && *e.Conditions.Ready {
						ready++
					}
				}
			}
			if ready < pods {
				return fmt.Errorf("%s has %d ready endpoints of Service %s, want %d", replica, ready, service, pods)
			}
			return nil
		})
	}
}

func (s *webhookServers) runKctl(args ...string) string {
	s.Helper()
	return testenv.Kctl(s, append([]string{"-n", s.ns}, args...)...)
}

// applyFile applies a manifest of testdata in the namespace, with TESTS_OWN replaced by its name.
func (s *webhookServers) applyFile(file string, replace ...string) {
	s.Helper()
	raw, err := os.ReadFile(file)
	if err != nil {
		s.Fatal(err)
	}
	s.runKctl("apply", "-f", writeManifest(s,
		strings.NewReplacer(append(replace, "TESTS_OWN", s.ns)...).Replace(string(raw))))
}

// labelNamespace sets labels of a namespace.
func labelNamespace(t testing.TB, ns, labels string) {
	t.Helper()
	_, err := testenv.Client(t).CoreV1().Namespaces().Patch(context.Background(), ns, types.MergePatchType,
		[]byte(`{"metadata":{"labels":`+labels+`}}`), metav1.PatchOptions{})
	if err != nil {
		t.Fatal(err)
	}
}

const (
	aboutPods = `[{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [pods]}]`
	aboutMaps = `[{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [configmaps]}]`

	plain = "apiVersion: v1\nkind: Pod\nmetadata: {name: NAME, labels: {app: NAME}}\nspec:\n  " +
		"terminationGracePeriodSeconds: 0\n" +
		"  containers: [{name: main, image: \"keelson.dev/tools:v1\", command: [sleep, \"1000000\"]}]\n"
)

// tryKctl runs a kctl command in a namespace and returns its output.
func tryKctl(t testing.TB, ns string, args ...string) (string, error) {
	t.Helper()
	return testenv.Try(t, filepath.Join(testenv.Lab().Config.BinDir, "kctl"), append([]string{"-n", ns}, args...)...)
}

// F36: a sidecar injector in pods behind a Service adds a container, an init container and a volume
// to the pods of labeled namespaces, and all of them run. Pods with an opt-out label and other
// namespaces are not changed.
func TestSidecarInjection(t *testing.T) {
	t.Parallel()
	s := installWebhookServers(t, 1)
	meshed, bare := testenv.Namespace(t), testenv.Namespace(t)
	installMutating(t, meshed, "injector", webhook{from: s, path: "/inject", rules: aboutPods,
		more:     "reinvocationPolicy: IfNeeded",
		selector: "{matchLabels: {sidecar.example.com/injection: " + meshed + "}}"})
	labelNamespace(t, meshed, `{"sidecar.example.com/injection":"`+meshed+`"}`)
	for _, replica := range testenv.Replicas() {
		// each replica may create the pod, and each receives the webhook's configuration
		// independently
		pods, probe := testenv.ClientAt(t, replica).CoreV1().Pods(meshed), onePod("probe")
		testenv.Eventually(t, soon, func() error {
			p, err := pods.Create(context.Background(), probe, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			if err == nil && len(p.Spec.Containers) != 2 {
				err = fmt.Errorf("%s has not received the injector's configuration", replica)
			}
			return err
		})
	}
	web := strings.NewReplacer("NAME", "web").Replace(
		"apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: NAME}\nspec:\n  replicas: 2\n" +
			"  selector: {matchLabels: {app: NAME}}\n  template:\n    metadata: {labels: {app: NAME}}\n    spec:\n" +
			"      terminationGracePeriodSeconds: 0\n      containers: [{name: main, image: " +
			"\"keelson.dev/hello:v1\"}]\n")
	unlabelled := strings.NewReplacer(", labels: {app: NAME}", "", "NAME", "lone").Replace(plain)
	free := strings.NewReplacer("{app: NAME}", `{sidecar.example.com/inject: "false"}`, "NAME", "free").Replace(plain)
	for ns, manifests := range map[string][]string{meshed: {web, unlabelled, free},
		bare: {strings.ReplaceAll(plain, "NAME", "one")}} {
		testenv.Kctl(t, "-n", ns, "apply", "-f", writeManifest(t, strings.Join(manifests, "---\n")))
		testenv.Kctl(t, "-n", ns, "wait", "--for=condition=Ready", "pods", "--all", "--timeout=180s")
	}
	testenv.Kctl(t, "-n", meshed, "rollout", "status", "deployment/web", "--timeout=180s")
	const shape = "jsonpath={range " +
		".items[*]}{.metadata.labels.app}:{.spec.initContainers[*].name}/{.spec.containers[*].name}/" +
		"{.status.initContainerStatuses[*].state.terminated.reason}/{.status.containerStatuses[*].ready} {end}"
	sidecar := "proxy-init/main proxy/Completed/true true"
	wanting := []string{"-n", meshed, "get", "pods", "-l", "!sidecar.example.com/inject",
		"--sort-by=.metadata.labels.app", "-o", shape}
	if got, want := testenv.Kctl(t, wanting...), fmt.Sprintf(":%s web:%s web:%s ", sidecar, sidecar, sidecar); got !=
		want {
		t.Errorf("the pods are %q, want %q", got, want)
	}
	const parts = "jsonpath={.spec.containers[*].name}/{.spec.initContainers[*].name}"
	if got := testenv.Kctl(t, "-n", meshed, "get", "pods", "free", "-o", parts); got != "main/" {
		t.Errorf("the pod that did not want it has %q", got)
	}
	if got := testenv.Kctl(t, "-n", bare, "get", "pods", "-o", shape); got != "one:/main//true " {
		t.Errorf("in another namespace there is %q", got)
	}
	testenv.Eventually(t, soon, func() error {
		if got := testenv.Kctl(t, "-n", meshed, "logs", "deployment/web", "-c", "proxy"); !strings.HasSuffix(got,
			"redirect\n") {
			return fmt.Errorf("the sidecar's output is %q", got)
		}
		return nil
	})
	got := testenv.Kctl(t, "-n", meshed, "get", "pods", "-l", "sidecar.example.com/status=injected", "-o", "name")
	if strings.Count(got, "pod/") != 3 {
		t.Errorf("labelled by the injector: %s", got)
	}
}
