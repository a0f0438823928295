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

// importRule lets packages at or below From import packages at or below each of To,
// in addition to packages below the same From. The first rule with a matching From
// applies (longest first in the table). Why is printed with every forbidden import.
type importRule struct {
	From string
	To   []string
	Why  string
}

// importLaw is the import law. All packages may import internal; cmd and test may import all
// packages. "=" before a path selects that package only, not the packages below it.
var importLaw = []importRule{
	{"raftstore/replica/failover", nil,
		"when and for whom an election starts is decided without raft, sockets and clocks"},
	{"raftstore/replica/forwarding", []string{"=raftstore", "=raftstore/replica/peernet",
		"=raftstore/replica/proposals", "proto/store"}, "batches go to the leader over the connections of peernet"},
	{"=raftstore/replica", []string{"=raftstore", "raftstore/mvcc", "raftstore/watch", "raftstore/disk",
		"raftstore/replica", "proto/store"},
		"the raft shell joins the pure parts, the disk and its own parts, and knows only them"},
	{"raftstore/replica", []string{"=raftstore", "raftstore/mvcc", "raftstore/watch", "raftstore/disk", "proto/store"},
		"a part of a replica knows no other part, and no replica"},
	{"raftstore/disk/sector", nil, "the sectors of a file do not depend on its content"},
	{"raftstore/disk/journal", []string{"=raftstore/disk/sector"},
		"the journal is in front of any log store, and does not depend on the data directory"},
	{"raftstore/disk/wal", []string{"=raftstore/disk/sector"},
		"the log in segments does not depend on the data directory"},
	{"raftstore/disk", []string{"=raftstore", "=raftstore/mvcc", "raftstore/disk"},
		"the data directory knows log, votes and snapshots, and no replica"},
	{"raftstore/storetest", []string{"raftstore", "proto/store"}, "the conformance suite drives every implementation"},
	{"raftstore", []string{"=raftstore", "proto/store"},
		"the store knows bytes and revisions and nothing of Kubernetes or its siblings"},

	{"controlplane/server", []string{"controlplane", "raftstore", "proto"}, "wiring"},
	{"=controlplane/api/kinds", []string{"controlplane/api"}, "the list of all kinds"},
	{"controlplane/api/kinds/kindstest", []string{"=controlplane/api", "=controlplane/api/kinds",
		"=controlplane/api/kinds/fieldrules"}, "the tests of all groups share it"},
	{"controlplane/api/kinds/fieldrules", nil, "rules for values depend on no kind"},
	{"controlplane/api/kinds/expressions", nil, "expressions are declared without the kinds that contain them"},
	{"controlplane/api/kinds/builder", []string{"=controlplane/api", "=controlplane/api/kinds/fieldrules"},
		"the construction of a kind depends on no kind"},
	{"controlplane/api/kinds/core/podspec", []string{"=controlplane/api", "=controlplane/api/kinds/builder",
		"=controlplane/api/kinds/fieldrules", "=controlplane/api/kinds/core/podspec/podtable"},
		"pods and pod templates depend on no API group"},
	{"controlplane/api/kinds/core", []string{"=controlplane/api", "=controlplane/api/balancer",
		"=controlplane/api/kinds/builder", "=controlplane/api/kinds/fieldrules",
		"=controlplane/api/kinds/core/podspec"}, "the core group depends on no other group"},
	{"controlplane/api/kinds", []string{"=controlplane/api", "=controlplane/api/custom",
		"=controlplane/api/kinds/builder", "=controlplane/api/kinds/fieldrules", "=controlplane/api/kinds/expressions",
		"controlplane/api/kinds/core"},
		"an API group uses the core group, which has pod templates, claims and addresses, and no other group"},
	{"controlplane/datadir", []string{"controlplane/api", "controlplane/pki", "=controlplane/controllers/nodecidr",
		"raftstore"}, "the data directory of a replica is what its parts share: ranges of a cluster are checked by " +
		"the rules of the controller that divides them"},
	{"controlplane/recovery", []string{"controlplane/recovery", "=controlplane/datadir", "controlplane/api",
		"controlplane/client", "controlplane/pki", "=controlplane/registry/storedform", "raftstore", "proto"},
		"recovery works on the data of a stopped replica, and is wired by the server alone"},
	{"controlplane/keyrotation/rotation", nil, "the steps of a rotation are decided by records and reports alone"},
	{"controlplane/keyrotation", []string{"=controlplane/keyrotation/rotation", "=controlplane/datadir",
		"controlplane/api", "controlplane/client", "controlplane/pki", "=controlplane/registry",
		"=controlplane/controllers/serviceaccount", "raftstore", "proto"},
		"key rotation reaches the rest of a replica through an interface, and is wired by the server alone: it waits " +
			"for the ConfigMap of root certificates that the controller of service accounts writes"},
	{"controlplane/membership/autopilot", nil,
		"whether and how a dead voter is replaced is decided by what the leader has measured"},
	{"controlplane/membership", []string{"=controlplane/membership/autopilot", "=controlplane/datadir",
		"controlplane/api", "controlplane/client", "controlplane/pki", "=controlplane/registry", "raftstore", "proto"},
		"membership reaches the rest of a replica through interfaces, and is wired by the server alone"},
	{"controlplane/operator", []string{"=controlplane/datadir", "controlplane/api", "controlplane/client",
		"controlplane/pki", "=controlplane/registry", "raftstore", "proto"},
		"the operator's verbs reach the rest of a replica through interfaces, and are wired by the server alone"},
	{"controlplane/api", []string{"controlplane/api"}, "kinds are pure"},
	{"controlplane/registry/storedform", []string{"=raftstore", "=controlplane/api"},
		"keys and stored forms depend on no cache and on no write"},
	{"controlplane/registry/storeerrors", []string{"=raftstore", "=controlplane/api",
		"=controlplane/registry/storedform"}, "API statuses follow from errors of the store alone"},
	{"controlplane/registry/objectmeta", []string{"=controlplane/api"}, "the rules of metadata are pure"},
	{"controlplane/registry/fieldowners", []string{"=controlplane/api", "=controlplane/registry/objectmeta"},
		"field ownership follows from objects alone"},
	{"controlplane/registry/watchcache", []string{"=raftstore", "=controlplane/api",
		"=controlplane/registry/storedform", "=controlplane/registry/storeerrors",
		"=controlplane/registry/fieldowners"}, "the watch cache follows the store and depends on no write"},
	{"controlplane/registry/registrytest", []string{"=controlplane/api", "=controlplane/api/kinds/kindstest",
		"=controlplane/registry"}, "a registry without an API server, for tests of callers"},
	{"controlplane/registry", []string{"=raftstore", "controlplane/api", "controlplane/registry"},
		"objects on a store"},
	{"controlplane/apiserver/apiservertest", []string{"controlplane/apiserver", "controlplane/api",
		"controlplane/client", "controlplane/controllers", "controlplane/pki", "controlplane/registry", "raftstore"},
		"the tests of the API server's parts share a replica on a store in memory, with the controllers " +
			"that its tests need"},
	{"=controlplane/apiserver/admission", []string{"controlplane/api"}, "the types of admission depend on no plugin"},
	{"controlplane/apiserver/admission/admissiontest", []string{"controlplane/api"},
		"the tests of all plugins share it"},
	{"controlplane/apiserver/admission/noderestriction",
		[]string{"=controlplane/apiserver/admission", "controlplane/api"},
		"a plugin depends on the types of admission and on no other plugin"},
	{"controlplane/apiserver/admission/objectlimits", []string{"=controlplane/apiserver/admission", "controlplane/api"},
		"a plugin depends on the types of admission and on no other plugin"},
	{"controlplane/apiserver/admission/services", []string{"=controlplane/apiserver/admission", "controlplane/api"},
		"a plugin depends on the types of admission and on no other plugin"},
	{"controlplane/apiserver/bootstrap", []string{"=controlplane/apiserver/admission/builtin",
		"=controlplane/apiserver/authz", "=controlplane/apiserver/discovery", "controlplane/registry",
		"controlplane/api", "controlplane/pki"},
		"the leader writes the objects of a cluster through the pipeline: the server injects it"},
	{"controlplane/apiserver", []string{"controlplane/registry", "controlplane/api", "controlplane/pki",
		"controlplane/apiserver"}, "HTTP in front of the registry; the store and the leader's work are behind it"},
	{"controlplane/client", []string{"controlplane/api"}, "the server injects the backend"},
	{"controlplane/controllers/gateway", []string{"controlplane/api", "controlplane/client",
		"=controlplane/controllers/engine", "=ingressproxy/gateway", "=ingressproxy/pairs", "=ingressproxy/route"},
		"what a Gateway's status says and what its proxy does is one judgement, which is pure"},
	{"controlplane/controllers/ingress", []string{"controlplane/api", "controlplane/client",
		"=controlplane/controllers/engine", "=ingressproxy/ingress", "=ingressproxy/pairs"},
		"what an Ingress means is worked out once, by the proxy's own pure part"},
	{"controlplane/controllers/testcluster", []string{"controlplane/api", "controlplane/apiserver",
		"controlplane/client", "controlplane/controllers", "controlplane/registry", "=controlplane/scheduler",
		"raftstore"}, "a cluster in memory for the tests of all controllers"},
	{"=controlplane/controllers", []string{"controlplane/api", "controlplane/controllers"},
		"the list of all controllers"},
	{"controlplane/controllers", []string{"controlplane/api", "controlplane/client",
		"=controlplane/controllers/engine"},
		"a controller uses the engine and the API, never another controller, the " +
			"store or the agents"},
	{"controlplane/scheduler", []string{"controlplane/api", "controlplane/client", "=controlplane/scheduler",
		"=controlplane/scheduler/framework", "=controlplane/scheduler/plugins", "=controlplane/scheduler/config",
		"=controlplane/scheduler/extender"}, "a plugin uses the framework; the scheduler writes through the API only"},
	{"controlplane/nodegateway/policy", []string{"=controlplane/api"},
		"the pods that a policy selects follow from objects alone"},
	{"controlplane/nodegateway/wire", []string{"=controlplane/api", "=controlplane/api/decodelimits", "proto/fleet"},
		"the forms and bounds of the protocol, which all parts of the node gateway share, depend on no part"},
	{"controlplane/nodegateway/accept", []string{"=controlplane/nodegateway/wire", "controlplane/api",
		"controlplane/client", "controlplane/pki", "proto/fleet"},
		"connections and enrollment are independent of what a session carries"},
	{"controlplane/nodegateway/assign", []string{"=controlplane/nodegateway/wire", "=controlplane/nodegateway/policy",
		"controlplane/api", "controlplane/client", "proto/fleet"},
		"the objects of a node follow from the informers: no session and no report is needed to compute them"},
	{"controlplane/nodegateway/report", []string{"=controlplane/nodegateway/wire", "controlplane/api",
		"controlplane/client", "proto/fleet"}, "reports are written through the API, whatever the session sends down"},
	{"controlplane/nodegateway/stream", []string{"=controlplane/nodegateway/wire", "=controlplane/api", "proto/fleet"},
		"a tunnel carries bytes: it needs no object and no client"},
	{"controlplane/nodegateway/session", []string{"=controlplane/nodegateway/wire", "=controlplane/nodegateway/assign",
		"=controlplane/nodegateway/report", "controlplane/api", "controlplane/client", "controlplane/pki",
		"proto/fleet"}, "a session joins what is sent down and what is sent up; it knows neither " +
		"connections nor tunnels"},
	{"controlplane/nodegateway", []string{"controlplane/nodegateway", "controlplane/api", "controlplane/client",
		"controlplane/pki", "proto/fleet"},
		"wiring: the node gateway has no authoritative state, it reads and writes " +
			"through the API"},
	{"controlplane/vip", nil, "an address on a link knows nothing of who leads: it is asked"},
	{"controlplane/pki", []string{"=controlplane/api"}, "keys and certificates, nothing else"},

	{"agent/node", []string{"agent", "proto/fleet", "cni", "csi"}, "wiring"},
	{"agent/oci/wire", nil, "the shim's protocol must stay small"},
	{"agent/oci/netns", nil, "a network namespace is created without knowing pods"},
	{"agent/oci/shimclient", []string{"=agent/oci/wire"}, "the connection to a shim carries messages"},
	{"agent/oci/podcgroup", []string{"=agent"}, "cgroups are limited and measured without knowing containers"},
	{"agent/oci/containerspec", []string{"=agent", "=agent/oci/bundle"},
		"a specification follows from the request and the host"},
	{"agent/oci", []string{"=agent", "agent/oci", "proto/fleet", "cni", "csi"},
		"the runtime uses the agent's vocabulary and its own parts"},
	{"agent/pod/lifecycle", []string{"=agent"}, "decisions about a pod depend on its state and the time only"},
	{"agent/pod/diskusage", []string{"=agent"}, "the usage of a pod is measured without its worker"},
	{"agent/pod/podevents", []string{"=agent"}, "events of a pod are counted without its worker"},
	{"agent/pod/subpath", nil, "subPaths are mounted without knowing pods"},
	{"agent/pod/admission", []string{"=agent", "=agent/pod/lifecycle"},
		"the checks of a node are decisions about pods"},
	{"agent/pod/podfiles", []string{"=agent", "=agent/pod/lifecycle"},
		"the records of a pod are read and written without its worker"},
	{"agent/pod/criconfig", []string{"=agent", "=agent/pod/lifecycle", "=agent/pod/podfiles", "=agent/pod/subpath"},
		"a configuration follows from the pod and the node's settings; it names the pod's files and mounts"},
	{"agent/pod", []string{"=agent", "agent/pod"}, "the workers join decisions and effects"},
	{"agent/dns", []string{"=agent", "agent/dns"}, "the DNS server uses the agent's vocabulary and its own parts"},
	{"agent/volume", []string{"=agent", "agent/volume", "csi"},
		"volumes use the agent's vocabulary, CSI and their own parts"},
	{"agent/proxy/proxytest", nil, "the objects of the proxy's tests depend on no package of the agent"},
	{"agent/proxy/servicemodel", []string{"=agent"}, "the ports that a node serves follow from objects alone"},
	{"agent/proxy", []string{"=agent", "agent/proxy"},
		"the Service proxy uses the agent's vocabulary and its own parts"},
	{"agent", []string{"=agent", "proto/fleet", "cni", "csi"},
		"agent packages share the vocabulary and do not know each other; the agent never sees the " +
			"control plane's code"},
	{"cni", []string{"cni"}, "a CNI plugin serves either side and knows neither"},
	{"csi", []string{"csi"}, "the CSI client serves either side and knows neither"},
	{"ingressproxy/route", nil, "what a proxy does with a request is worked out without sockets and without objects"},
	{"ingressproxy/serve", []string{"ingressproxy/route"}, "the data plane goes by a table, whoever has made it"},
	{"ingressproxy", []string{"ingressproxy"},
		"the proxy is a pod: it has the API's public clients, and knows neither the control plane's code nor a node's"},
	{"kctl/verb", nil, "what all commands share depends on no command"},
	{"kctl/backupfile", []string{"controlplane/api"}, "a file on the disk of the user depends on no command"},
	{"kctl/provision", []string{"controlplane/api", "deploy/lab", "deploy/machines", "deploy/upgrade", "=kctl/verb"},
		"a cluster is created and upgraded on its machines: no other command is needed for that"},
	{"kctl", []string{"controlplane/api", "deploy/lab", "deploy/machines", "deploy/upgrade", "=ingressproxy/gateway",
		"=ingressproxy/ingress", "=ingressproxy/route", "kctl"},
		"the command line talks to the API; it borrows columns, the lab, the machines that it reaches " +
			"by ssh and what Ingresses and Gateways mean, which is pure: a trace says what the proxy does"},
	{"deploy/machines", []string{"deploy/machines"},
		"machines are made by the scripts of a release, over ssh: whatever they run is a program of theirs"},
	{"deploy/lab", nil, "the lab runs binaries, it does not link them"},
	{"deploy/upgrade", nil,
		"the order of an upgrade follows from what can be seen of a cluster, whatever it is made of"},
	{"proto", []string{"proto"}, "generated code only"},
	{"internal", nil, "small tools without domain terms"},
}

// forbiddenImports are imports of other modules that packages below a root must not have, with the
// reason.
var forbiddenImports = []importRule{
	{"raftstore", []string{"k8s.io"}, "the store knows nothing of Kubernetes"},
	{"agent", []string{"k8s.io/client-go"}, "the agent reaches the API through its session only"},
	{"proto", []string{"k8s.io"}, "objects travel as bytes"},
	{"internal", []string{"k8s.io", "github.com", "google.golang.org"},
		"standard library only, except the YAML decoder of settings"},
	{"", []string{"k8s.io/kubernetes", "go.etcd.io/etcd", "github.com/containerd/containerd"},
		"the programs that Keelson replaces are not linked"},
}

// apiserverLeaves are the packages of k8s.io/apiserver that may be linked, each with what it costs
// the control plane's binary (stripped, linux/amd64, k8s.io 1.37): expressions, and the form of
// configuration files. An idle replica's resident memory grows by 2 to 5 MiB, of which below 1 MiB
// is not the file's; an environment takes 1 to 2 MiB when it is made. docs/explanation/memory.md
// has what the other packages cost, and how that is measured. Its generic server is not among them
// and may not become linked through another either.
var apiserverLeaves = map[string]string{
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
	"pkg/warning": "with schema/cel of k8s.io/apiextensions-apiserver, whose schema " +
		"packages add 1.6 MB",
	"pkg/util/webhook": "with validation of k8s.io/apiextensions-apiserver, for three " +
		"checks of addresses",
	"pkg/server/egressselector":      "with pkg/util/webhook: together with what follows 1.8 MB",
	"pkg/endpoints/request":          "with pkg/util/webhook: the keys of a context",
	"pkg/audit":                      "with pkg/endpoints/request: types",
	"pkg/apis/audit":                 "with pkg/audit: types",
	"pkg/util/x509metrics":           "with pkg/util/webhook: a counter",
	"pkg/apis/flowcontrol/bootstrap": "the flow schemas and levels of every cluster: below 0.1 MB",
	"pkg/apis/apiserver": "configuration files of authentication and authorization, with their " +
		"validation: 1 MB",
}

// isLeaf reports whether a package of k8s.io/apiserver may be linked.
func isLeaf(pkg string) bool {
	for root := range apiserverLeaves {
		if isBelow(pkg, "k8s.io/apiserver/"+root) {
			return true
		}
	}
	return false
}

type listedPackage struct {
	ImportPath   string
	Imports      []string
	TestImports  []string
	XTestImports []string
	CgoFiles     []string
}

// listPackages returns the packages of the module. All tests share one run of `go list`.
func listPackages(t *testing.T) []listedPackage {
	t.Helper()
	all, err := modulePackages()
	if err != nil {
		t.Fatal(err)
	}
	return all
}

var modulePackages = sync.OnceValues(func() ([]listedPackage, error) {
	out, err := exec.Command("go", "list", "-json=ImportPath,Imports,TestImports,XTestImports,CgoFiles",
		"./...").Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	var all []listedPackage
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p listedPackage
		if err := dec.Decode(&p); err == io.EOF {
			return all, nil
		} else if err != nil {
			return nil, fmt.Errorf("go list: %w", err)
		}
		all = append(all, p)
	}
})

func isBelow(pkg, root string) bool {
	if only, ok := strings.CutPrefix(root, "="); ok {
		return pkg == only
	}
	return root == "" || pkg == root || strings.HasPrefix(pkg, root+"/")
}

// forbiddenReason returns the reason why from may not import to (both relative to the module), or
// "" if it may.
func forbiddenReason(from, to string) string {
	for _, free := range []string{"cmd", "test", "examples", "scripts", ""} {
		if free != "" && isBelow(from, free) || from == "" {
			return ""
		}
	}
	if isBelow(to, "internal") {
		return ""
	}
	for _, r := range importLaw {
		if !isBelow(from, r.From) {
			continue
		}
		for _, allowed := range r.To {
			if isBelow(to, allowed) {
				return ""
			}
		}
		// A package may import the packages below it.
		if strings.HasPrefix(to, from+"/") && from != r.From {
			return ""
		}
		return r.Why
	}
	return "no rule names " + from + ": add a rule to the import law first"
}

// F77: among others, no controller and no scheduler is part of the API server.
func TestImportLaw(t *testing.T) {
	for _, p := range listPackages(t) {
		from := strings.TrimPrefix(strings.TrimPrefix(p.ImportPath, module), "/")
		for _, imp := range p.Imports {
			if to, ok := strings.CutPrefix(imp, module+"/"); ok {
				if why := forbiddenReason(from, to); why != "" {
					t.Errorf("%s must not import %s: %s", from, to, why)
				}
				continue
			}
			for _, r := range forbiddenImports {
				if !isBelow(from, r.From) {
					continue
				}
				for _, bad := range r.To {
					if imp == bad || strings.HasPrefix(imp, bad+"/") {
						t.Errorf("%s must not import %s: %s", from, imp, r.Why)
					}
				}
			}
			if isBelow(imp, "k8s.io/apiserver") && (!isLeaf(imp) || !isBelow(from, "controlplane/apiserver")) {
				t.Errorf("%s must not import %s: only packages of controlplane/apiserver may, and only the leaves",
					from, imp)
			}
			if strings.HasPrefix(imp, "github.com/opencontainers/runc/libcontainer") &&
				!isBelow(from, "agent/oci/container") && !isBelow(from, "cmd/oci") {
				t.Errorf("%s must not import %s: libcontainer stays behind agent/oci/container", from, imp)
			}
		}
		for _, imp := range slices.Concat(p.Imports, p.TestImports, p.XTestImports) {
			if imp == "testing/synctest" && from != "internal/virtual" {
				t.Errorf("%s must not import %s: internal/virtual has it without its crashes under the race detector",
					from, imp)
			}
		}
		if len(p.CgoFiles) > 0 && !isBelow(from, "agent/oci/container") {
			t.Errorf("%s uses cgo: only agent/oci/container may", from)
		}
	}
}

// The leaves must not link the generic API server.
func TestGenericServerIsNotLinked(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "./cmd/...").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	seen := false
	for pkg := range strings.SplitSeq(string(out), "\n") {
		if !isBelow(pkg, "k8s.io/apiserver") {
			continue
		}
		seen = true
		if !isLeaf(pkg) {
			t.Errorf("%s is linked, but is not one of the leaves", pkg)
		}
	}
	if !seen {
		t.Error("no leaf is linked: the list is out of date")
	}
	for _, pkg := range []string{"pkg/server", "pkg/registry/generic", "pkg/endpoints", "pkg/storage",
		"plugin/pkg/authenticator/token/oidc"} {
		if isLeaf("k8s.io/apiserver/" + pkg) {
			t.Errorf("the leaves include %s", pkg)
		}
	}
}

// Package names must name a concept.
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

// The import law must refuse forbidden imports.
func TestImportLawRefuses(t *testing.T) {
	for _, edge := range [][2]string{
		{"raftstore/mvcc", "raftstore/watch"},
		{"raftstore/replica", "controlplane/api"},
		{"raftstore/disk", "raftstore/replica"},
		{"raftstore/disk/journal", "raftstore/disk"},
		{"raftstore/disk/wal", "raftstore/disk/journal"},
		{"controlplane/registry", "controlplane/apiserver"},
		{"controlplane/apiserver", "raftstore"},
		{"controlplane/controllers/deployment", "controlplane/controllers/replicaset"},
		{"controlplane/controllers/deployment", "controlplane/registry"},
		{"controlplane/controllers/deployment", "controlplane/controllers"},
		{"controlplane/controllers/engine", "controlplane/controllers/deployment"},
		{"controlplane/nodegateway", "controlplane/scheduler"},
		{"controlplane/nodegateway/session", "controlplane/nodegateway/accept"},
		{"controlplane/nodegateway/report", "controlplane/nodegateway/assign"},
		{"controlplane/nodegateway/stream", "controlplane/client"},
		{"controlplane/api/kinds/apps", "controlplane/api/kinds/batch"},
		{"controlplane/api/kinds/core", "controlplane/api/kinds/storage"},
		{"controlplane/recovery", "controlplane/server"},
		{"controlplane/apiserver", "controlplane/recovery"},
		{"controlplane/keyrotation", "controlplane/nodegateway"},
		{"controlplane/keyrotation", "controlplane/recovery"},
		{"controlplane/nodegateway", "controlplane/keyrotation"},
		{"controlplane/membership", "controlplane/keyrotation"},
		{"controlplane/membership", "controlplane/operator"},
		{"controlplane/operator", "controlplane/keyrotation"},
		{"controlplane/operator", "controlplane/recovery"},
		{"controlplane/apiserver", "controlplane/operator"},
		{"agent/pod", "agent/oci"},
		{"agent/pod/lifecycle", "agent/pod/criconfig"},
		{"agent/oci/containerspec", "agent/oci/podcgroup"},
		{"agent/pod/criconfig", "agent/pod"},
		{"agent/session", "controlplane/pki"},
		{"kctl", "controlplane/registry"},
		{"ingressproxy/serve", "ingressproxy/ingress"},
		{"ingressproxy/ingress", "controlplane/api"},
	} {
		if forbiddenReason(edge[0], edge[1]) == "" {
			t.Errorf("the law allows %s", fmt.Sprint(edge))
		}
	}
	for _, edge := range [][2]string{
		{"raftstore/replica", "raftstore/mvcc"},
		{"raftstore/replica", "raftstore/disk"},
		{"controlplane/controllers/deployment", "controlplane/controllers/engine"},
		{"controlplane/controllers", "controlplane/controllers/deployment"},
		{"controlplane/api/kinds", "controlplane/api/kinds/apps"},
		{"controlplane/api/kinds/apps", "controlplane/api/kinds/core/podspec"},
		{"controlplane/scheduler/plugins/nodename", "controlplane/scheduler/framework"},
		{"agent/node", "agent/oci"},
		{"agent/oci", "agent/oci/shimclient"},
		{"cmd/agent", "agent/node"},
		{"agent/pod", "internal/backoff"},
		{"agent/pod", "agent/pod/lifecycle"},
		{"agent/pod/admission", "agent/pod/lifecycle"},
	} {
		if why := forbiddenReason(edge[0], edge[1]); why != "" {
			t.Errorf("the law forbids %v: %s", edge, why)
		}
	}
}
