package keelson

import (
	"encoding/json"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
)

const module = "keelson.dev/keelson"

// rule lets packages at or below From import packages at or below each of To,
// beyond what is below the same From. The first rule whose From matches (longest
// first in the table) decides; Why is printed with every forbidden edge.
type rule struct {
	From string
	To   []string
	Why  string
}

// The import law. Everyone may use internal; cmd and test may use everything.
// "=" in front of a path means that package alone, not what is below it.
var law = []rule{
	{"raftstore/replica", []string{"=raftstore", "raftstore/mvcc", "raftstore/watch", "raftstore/disk", "proto/store"}, "the raft shell joins the pure parts and the disk, and knows only them"},
	{"raftstore/disk/platter", nil, "files that outlive a power cut know nothing of what is in them"},
	{"raftstore/disk", []string{"=raftstore", "=raftstore/mvcc", "raftstore/disk"}, "the data directory knows log, votes and snapshots, and no replica"},
	{"raftstore/storetest", []string{"raftstore", "proto/store"}, "the conformance suite drives every implementation"},
	{"raftstore", []string{"=raftstore", "proto/store"}, "the store knows bytes and revisions and nothing of Kubernetes or its siblings"},

	{"controlplane/server", []string{"controlplane", "raftstore", "proto"}, "wiring"},
	{"=controlplane/api/kinds", []string{"controlplane/api"}, "the list of all kinds"},
	{"controlplane/api/kinds/kindstest", []string{"=controlplane/api", "=controlplane/api/kinds", "=controlplane/api/kinds/fieldrules"}, "the tests of all groups share it"},
	{"controlplane/api/kinds/fieldrules", nil, "rules for values depend on no kind"},
	{"controlplane/api/kinds/expressions", nil, "expressions are declared without the kinds that contain them"},
	{"controlplane/api/kinds/builder", []string{"=controlplane/api", "=controlplane/api/kinds/fieldrules"}, "the construction of a kind depends on no kind"},
	{"controlplane/api/kinds/core/podspec", []string{"=controlplane/api", "=controlplane/api/kinds/builder", "=controlplane/api/kinds/fieldrules"}, "pods and pod templates depend on no API group"},
	{"controlplane/api/kinds/core", []string{"=controlplane/api", "=controlplane/api/balancer", "=controlplane/api/kinds/builder", "=controlplane/api/kinds/fieldrules", "=controlplane/api/kinds/core/podspec"}, "the core group depends on no other group"},
	{"controlplane/api/kinds", []string{"=controlplane/api", "=controlplane/api/custom", "=controlplane/api/kinds/builder", "=controlplane/api/kinds/fieldrules", "=controlplane/api/kinds/expressions", "controlplane/api/kinds/core"}, "an API group uses the core group, which has pod templates, claims and addresses, and no other group"},
	{"controlplane/datadir", []string{"controlplane/api", "controlplane/pki", "=controlplane/controllers/nodecidr", "raftstore"}, "the data directory of a replica is what its parts share: ranges of a cluster are checked by the rules of the controller that divides them"},
	{"controlplane/recovery", []string{"controlplane/recovery", "=controlplane/datadir", "controlplane/api", "controlplane/client", "controlplane/pki", "=controlplane/registry", "raftstore", "proto"}, "recovery works on the data of a stopped replica, and is wired by the server alone"},
	{"controlplane/api", []string{"controlplane/api"}, "kinds are pure"},
	{"controlplane/registry", []string{"=raftstore", "controlplane/api"}, "objects on a store"},
	{"controlplane/apiserver", []string{"controlplane/registry", "controlplane/api", "controlplane/pki", "controlplane/apiserver"}, "HTTP in front of the registry; the store and the leader's work are behind it"},
	{"controlplane/client", []string{"controlplane/api"}, "the server injects the backend"},
	{"controlplane/controllers/gateway", []string{"controlplane/api", "controlplane/client", "=controlplane/controllers", "=ingressproxy/gateway", "=ingressproxy/pairs", "=ingressproxy/route"}, "what a Gateway's status says and what its proxy does is one judgement, which is pure"},
	{"controlplane/controllers/ingress", []string{"controlplane/api", "controlplane/client", "=controlplane/controllers", "=ingressproxy/ingress", "=ingressproxy/pairs"}, "what an Ingress means is worked out once, by the proxy's own pure part"},
	{"controlplane/controllers", []string{"controlplane/api", "controlplane/client", "=controlplane/controllers"}, "a controller uses the engine and the API, never another controller, the store or the agents"},
	{"controlplane/scheduler", []string{"controlplane/api", "controlplane/client", "=controlplane/scheduler", "=controlplane/scheduler/framework", "=controlplane/scheduler/plugins", "=controlplane/scheduler/config", "=controlplane/scheduler/extender"}, "a plugin uses the framework; the scheduler writes through the API only"},
	{"controlplane/nodegateway/policy", nil, "which pods a policy means is worked out from objects alone"},
	{"controlplane/nodegateway", []string{"=controlplane/nodegateway/policy", "controlplane/api", "controlplane/client", "controlplane/pki", "proto/fleet"}, "the node gateway has no authoritative state: it reads and writes through the API"},
	{"controlplane/vip", nil, "an address on a link knows nothing of who leads: it is asked"},
	{"controlplane/pki", []string{"=controlplane/api"}, "keys and certificates, nothing else"},

	{"agent/node", []string{"agent", "proto/fleet", "cni", "csi"}, "wiring"},
	{"agent/oci", []string{"=agent", "agent/oci", "proto/fleet", "cni", "csi"}, "the runtime uses the agent's vocabulary and its own parts"},
	{"agent/dns", []string{"=agent", "agent/dns"}, "the DNS server uses the agent's vocabulary and its own parts"},
	{"agent/volume", []string{"=agent", "agent/volume", "csi"}, "volumes use the agent's vocabulary, CSI and their own parts"},
	{"agent", []string{"=agent", "proto/fleet", "cni", "csi"}, "agent packages share the vocabulary and do not know each other; the agent never sees the control plane's code"},
	{"cni", []string{"cni"}, "a CNI plugin serves either side and knows neither"},
	{"csi", []string{"csi"}, "the CSI client serves either side and knows neither"},
	{"ingressproxy/route", nil, "what a proxy does with a request is worked out without sockets and without objects"},
	{"ingressproxy/serve", []string{"ingressproxy/route"}, "the data plane goes by a table, whoever has made it"},
	{"ingressproxy", []string{"ingressproxy"}, "the proxy is a pod: it has the API's public clients, and knows neither the control plane's code nor a node's"},
	{"kctl", []string{"controlplane/api", "deploy/lab", "deploy/machines", "deploy/upgrade", "=ingressproxy/gateway", "=ingressproxy/ingress", "=ingressproxy/route", "kctl"}, "the command line talks to the API; it borrows columns, the lab, the machines that it reaches by ssh and what Ingresses and Gateways mean, which is pure: a trace says what the proxy does"},
	{"deploy/machines", []string{"deploy/machines"}, "machines are made by the scripts of a release, over ssh: whatever they run is a program of theirs"},
	{"deploy/lab", nil, "the lab runs binaries, it does not link them"},
	{"deploy/upgrade", nil, "the order of an upgrade follows from what can be seen of a cluster, whatever it is made of"},
	{"proto", []string{"proto"}, "generated code only"},
	{"internal", nil, "small tools without domain words"},
}

// notAllowed are imports from outside that a root must not have, with the reason.
var notAllowed = []rule{
	{"raftstore", []string{"k8s.io"}, "the store knows nothing of Kubernetes"},
	{"agent", []string{"k8s.io/client-go"}, "the agent has one door, its session"},
	{"proto", []string{"k8s.io"}, "objects travel as bytes"},
	{"internal", []string{"k8s.io", "github.com", "google.golang.org"}, "standard library only, but for the YAML that settings reads"},
	{"", []string{"k8s.io/kubernetes", "go.etcd.io/etcd", "github.com/containerd/containerd"}, "what users flee from is not linked"},
}

// leaves are the packages of k8s.io/apiserver that may be linked, each with what it costs the control plane's binary
// (stripped, linux/amd64, k8s.io 1.37): expressions, and the form of configuration files. An idle replica's resident
// memory grows by 2 to 5 MiB, of which below 1 MiB is not the file's; an environment takes 1 to 2 MiB when it is made.
// docs/explanation/memory.md has what the other packages cost, and how that is measured.
// Its generic server is not among them and may not become linked through another either.
var leaves = map[string]string{
	"pkg/cel":                           "with cel-go 6.3 MB: Kubernetes' types and functions in expressions",
	"pkg/apis/cel":                      "cost limits, with pkg/cel",
	"pkg/authorization/authorizer":      "interfaces, with pkg/cel/library",
	"pkg/authentication/user":           "interfaces, with pkg/cel/library",
	"pkg/authentication/serviceaccount": "names, with pkg/cel/library",
	"pkg/util/feature":                  "feature gates, with pkg/cel/environment: 0.8 MB",
	"pkg/util/compatibility":            "versions, with pkg/cel/environment",
	"pkg/features":                      "the gates' names, with pkg/apis/apiserver/validation",
	"pkg/authentication/cel":            "expressions over claims and users: below 0.1 MB",
	"pkg/authorization/cel":             "expressions over access reviews: below 0.1 MB",
	"pkg/warning":                       "with schema/cel of k8s.io/apiextensions-apiserver, whose schema packages add 1.6 MB",
	"pkg/util/webhook":                  "with validation of k8s.io/apiextensions-apiserver, for three checks of addresses",
	"pkg/server/egressselector":         "with pkg/util/webhook: together with what follows 1.8 MB",
	"pkg/endpoints/request":             "with pkg/util/webhook: the keys of a context",
	"pkg/audit":                         "with pkg/endpoints/request: types",
	"pkg/apis/audit":                    "with pkg/audit: types",
	"pkg/util/x509metrics":              "with pkg/util/webhook: a counter",
	"pkg/apis/flowcontrol/bootstrap":    "the flow schemas and levels of every cluster: below 0.1 MB",
	"pkg/apis/apiserver":                "configuration files of authentication and authorization, with their validation: 1 MB",
}

// leaf says whether a package of k8s.io/apiserver may be linked.
func leaf(pkg string) bool {
	for root := range leaves {
		if below(pkg, "k8s.io/apiserver/"+root) {
			return true
		}
	}
	return false
}

type listed struct {
	ImportPath   string
	Imports      []string
	TestImports  []string
	XTestImports []string
	CgoFiles     []string
}

// listPackages returns the packages of the module. All tests share one run of `go list`.
func listPackages(t *testing.T) []listed {
	t.Helper()
	all, err := modulePackages()
	if err != nil {
		t.Fatal(err)
	}
	return all
}

var modulePackages = sync.OnceValues(func() ([]listed, error) {
	out, err := exec.Command("go", "list", "-json=ImportPath,Imports,TestImports,XTestImports,CgoFiles", "./...").Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	var all []listed
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p listed
		if err := dec.Decode(&p); err == io.EOF {
			return all, nil
		} else if err != nil {
			return nil, fmt.Errorf("go list: %w", err)
		}
		all = append(all, p)
	}
})

func below(pkg, root string) bool {
	if only, ok := strings.CutPrefix(root, "="); ok {
		return pkg == only
	}
	return root == "" || pkg == root || strings.HasPrefix(pkg, root+"/")
}

// forbidden says why from may not import to (both relative to the module); "" when it may.
func forbidden(from, to string) string {
	for _, free := range []string{"cmd", "test", "examples", "scripts", ""} {
		if free != "" && below(from, free) || from == "" {
			return ""
		}
	}
	if below(to, "internal") {
		return ""
	}
	for _, r := range law {
		if !below(from, r.From) {
			continue
		}
		for _, allowed := range r.To {
			if below(to, allowed) {
				return ""
			}
		}
		// A package's own parts are its own business when they are below it.
		if strings.HasPrefix(to, from+"/") && from != r.From {
			return ""
		}
		return r.Why
	}
	return "no rule names " + from + ": add the room to the law first"
}

// F77: among others, no controller and no scheduler is part of the API server.
func TestImportLaw(t *testing.T) {
	for _, p := range listPackages(t) {
		from := strings.TrimPrefix(strings.TrimPrefix(p.ImportPath, module), "/")
		for _, imp := range p.Imports {
			if to, ok := strings.CutPrefix(imp, module+"/"); ok {
				if why := forbidden(from, to); why != "" {
					t.Errorf("%s must not import %s: %s", from, to, why)
				}
				continue
			}
			for _, r := range notAllowed {
				if !below(from, r.From) {
					continue
				}
				for _, bad := range r.To {
					if imp == bad || strings.HasPrefix(imp, bad+"/") {
						t.Errorf("%s must not import %s: %s", from, imp, r.Why)
					}
				}
			}
			if below(imp, "k8s.io/apiserver") && (!leaf(imp) || !below(from, "controlplane/apiserver")) {
				t.Errorf("%s must not import %s: only the API's packages may, and of the leaves alone", from, imp)
			}
			if strings.HasPrefix(imp, "github.com/opencontainers/runc/libcontainer") && !below(from, "agent/oci/container") && !below(from, "cmd/oci") {
				t.Errorf("%s must not import %s: libcontainer stays behind agent/oci/container", from, imp)
			}
		}
		for _, imp := range slices.Concat(p.Imports, p.TestImports, p.XTestImports) {
			if imp == "testing/synctest" && from != "internal/virtual" {
				t.Errorf("%s must not import %s: internal/virtual has it without its crashes under the race detector", from, imp)
			}
		}
		if len(p.CgoFiles) > 0 && !below(from, "agent/oci/container") {
			t.Errorf("%s uses cgo: only agent/oci/container may", from)
		}
	}
}

// What the leaves import must not bring the generic server, nor what the control plane may not link.
func TestGenericServerIsNotLinked(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "./cmd/...").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	seen := false
	for pkg := range strings.SplitSeq(string(out), "\n") {
		if !below(pkg, "k8s.io/apiserver") {
			continue
		}
		seen = true
		if !leaf(pkg) {
			t.Errorf("%s is linked: it is none of the leaves", pkg)
		}
	}
	if !seen {
		t.Error("no leaf is linked: the list is out of date")
	}
	for _, pkg := range []string{"pkg/server", "pkg/registry/generic", "pkg/endpoints", "pkg/storage", "plugin/pkg/authenticator/token/oidc"} {
		if leaf("k8s.io/apiserver/" + pkg) {
			t.Errorf("%s is taken for a leaf", pkg)
		}
	}
}

// A name that says nothing hides a concept that has not been named.
func TestPackageNames(t *testing.T) {
	vague := []string{"util", "utils", "common", "helper", "helpers", "manager", "types", "misc"}
	for _, p := range listPackages(t) {
		for _, part := range strings.Split(strings.TrimPrefix(p.ImportPath, module), "/") {
			if slices.Contains(vague, part) {
				t.Errorf("%s: a package must not be named %q", p.ImportPath, part)
			}
		}
	}
}

// The law must be able to fail.
func TestImportLawRefuses(t *testing.T) {
	for _, edge := range [][2]string{
		{"raftstore/mvcc", "raftstore/watch"},
		{"raftstore/replica", "controlplane/api"},
		{"raftstore/disk", "raftstore/replica"},
		{"raftstore/disk/platter", "raftstore/disk"},
		{"controlplane/registry", "controlplane/apiserver"},
		{"controlplane/apiserver", "raftstore"},
		{"controlplane/controllers/deployment", "controlplane/controllers/replicaset"},
		{"controlplane/controllers/deployment", "controlplane/registry"},
		{"controlplane/nodegateway", "controlplane/scheduler"},
		{"controlplane/api/kinds/apps", "controlplane/api/kinds/batch"},
		{"controlplane/api/kinds/core", "controlplane/api/kinds/storage"},
		{"controlplane/recovery", "controlplane/server"},
		{"controlplane/apiserver", "controlplane/recovery"},
		{"agent/pod", "agent/oci"},
		{"agent/session", "controlplane/pki"},
		{"kctl", "controlplane/registry"},
		{"ingressproxy/serve", "ingressproxy/ingress"},
		{"ingressproxy/ingress", "controlplane/api"},
	} {
		if forbidden(edge[0], edge[1]) == "" {
			t.Errorf("the law allows %s", fmt.Sprint(edge))
		}
	}
	for _, edge := range [][2]string{
		{"raftstore/replica", "raftstore/mvcc"},
		{"raftstore/replica", "raftstore/disk"},
		{"controlplane/controllers/deployment", "controlplane/controllers"},
		{"controlplane/api/kinds", "controlplane/api/kinds/apps"},
		{"controlplane/api/kinds/apps", "controlplane/api/kinds/core/podspec"},
		{"controlplane/scheduler/plugins/nodename", "controlplane/scheduler/framework"},
		{"agent/node", "agent/oci"},
		{"agent/oci", "agent/oci/frame"},
		{"cmd/agent", "agent/node"},
		{"agent/pod", "internal/backoff"},
	} {
		if why := forbidden(edge[0], edge[1]); why != "" {
			t.Errorf("the law forbids %v: %s", edge, why)
		}
	}
}
