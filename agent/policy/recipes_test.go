package policy

import (
	"flag"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/knftables"
	"sigs.k8s.io/yaml"

	v1 "k8s.io/api/core/v1"
)

var rewrite = flag.Bool("rewrite", false, "write the golden files")

// town returns the pods of the recipes: some pods of namespace a are on the node, all others
// elsewhere.
func town() []*place {
	at := func(name, namespace string, app string, ip string, local bool, ports ...NamedPort) *place {
		return &place{name: name, namespace: namespace, labels: map[string]string{"app": app}, addresses: addrs(ip),
			local: local, ports: ports}
	}
	out := []*place{
		at("web", "a", "web", "10.88.0.10", true, NamedPort{"http", "tcp", 80}, NamedPort{"metrics", "tcp", 5000}),
		at("db", "a", "db", "10.88.0.11", true, NamedPort{"sql", "tcp", 5432}),
		at("other", "b", "web", "10.88.1.5", false, NamedPort{"http", "tcp", 8080}),
		at("prod", "c", "monitor", "10.88.1.6", false, NamedPort{"http", "tcp", 9090}),
		at("bystander", "b", "none", "10.88.0.12", true),
	}
	return append(out, &place{name: "world", stranger: true, addresses: addrs("203.0.113.9")},
		&place{name: "neighbour", stranger: true, addresses: addrs("172.17.1.9")},
		&place{name: "friend", stranger: true, addresses: addrs("172.17.9.9")})
}

// judged evaluates the rules of a ruleset for a first packet. It parses the text that nft receives.
type judged struct {
	t *testing.T
	r ruleset
}

func (j judged) passes(a try) bool {
	dst, src := a.server.String(), a.client.String()
	if v, ok := j.r.maps["pods-e4"][src]; ok && !j.chain(strings.TrimPrefix(v, "jump "), a) {
		return false
	}
	if v, ok := j.r.maps["pods-i4"][dst]; ok && a.from != nil && !j.chain(strings.TrimPrefix(v, "goto "), a) {
		return false
	}
	return true
}

// chain reports whether a chain accepts.
func (j judged) chain(name string, a try) bool {
	lines, ok := j.r.chains[name]
	if !ok {
		j.t.Fatalf("there is no chain %s", name)
	}
	for _, line := range lines {
		if line == "drop" {
			return false
		}
		if strings.HasSuffix(line, " drop") {
			continue // counters; only the last rule drops
		}
		if j.line(line, a) {
			return true
		}
	}
	return false
}

func (j judged) line(line string, a try) bool {
	words := strings.Fields(line)
	for len(words) > 0 && words[0] != "accept" && words[0] != "return" {
		switch {
		case words[0] == "ip" && words[2] == ".": // concatenation with @set
			at := 3
			for !strings.HasPrefix(words[at], "@") {
				at++
			}
			key := a.client.String() + " . " + a.server.String()
			switch {
			case words[1] == "daddr":
				key = a.server.String() + " . " + a.proto + " . " + itoa(a.port)
			case words[3] == "meta":
				key = a.client.String() + " . " + a.proto + " . " + itoa(a.port)
			}
			set := words[at][1:]
			if !j.r.selves[set][key] && (j.r.sets[set] == nil || !j.r.sets[set].elements[key]) {
				return false
			}
			words = words[at+1:]
		case words[0] == "ip":
			ip := a.client
			if words[1] == "daddr" {
				ip = a.server
			}
			if set, ok := strings.CutPrefix(words[2], "@"); ok {
				if !j.r.sets[set].elements[ip.String()] &&
					!within(ip, slices.Sorted(maps.Keys(j.r.sets[set].elements))) {
					return false
				}
				words = words[3:]
				continue
			}
			list, rest := braces(words[2:])
			if !within(ip, list) {
				return false
			}
			words = rest
		case words[0] == "meta":
			if words[2] != a.proto {
				return false
			}
			words = words[3:]
		case words[1] == "dport":
			list, rest := braces(words[2:])
			hit := false
			for _, s := range list {
				from, to, ok := strings.Cut(s, "-")
				if !ok {
					to = from
				}
				hit = hit || a.port >= atoi(from) && a.port <= atoi(to)
			}
			if !hit || words[0] != a.proto {
				return false
			}
			words = rest
		default:
			j.t.Fatalf("a rule that this test cannot read: %s", line)
		}
	}
	return true
}

// within reports whether an address is in one of the ranges.
func within(ip netip.Addr, ranges []string) bool {
	return slices.ContainsFunc(ranges, func(s string) bool {
		from, to, ok := strings.Cut(s, "-")
		return ok && !ip.Less(addrs(from)[0]) && !addrs(to)[0].Less(ip) || from == ip.String()
	})
}

func braces(words []string) (list, rest []string) {
	for i, w := range words[1:] {
		if w == "}" {
			return list, words[i+2:]
		}
		list = append(list, strings.TrimSuffix(w, ","))
	}
	return list, nil
}

// The well-known recipes and the examples of Kubernetes' documentation: the connections that they
// allow according to the documentation and to the rules for nft. Each has a golden file with its
// rules.
func TestRecipes(t *testing.T) {
	files, err := filepath.Glob("testdata/recipes/*.yaml")
	if err != nil || len(files) < 15 {
		t.Fatalf("%d recipes: %v", len(files), err)
	}
	for _, f := range files {
		t.Run(strings.TrimSuffix(filepath.Base(f), ".yaml"), func(t *testing.T) {
			raw, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			places := town()
			objects, want := recipe(t, string(raw))
			var policies []*policy
			groups := map[string]*v1.Endpoints{}
			for _, o := range objects {
				sent, has := grouped(o, places)
				for name, g := range has {
					groups[name] = g
				}
				p, err := parsePolicy(sent)
				if err != nil {
					t.Fatal(err)
				}
				policies = append(policies, p)
			}
			r := compileRules(local(places), policies).withSets(nil, func(string) bool {
				return true
			}, func(name string) (*v1.Endpoints, bool) { g, ok := groups[name]; return g, ok })
			j := judged{t, r}
			for _, a := range everyPair(places) {
				name := title(a)
				got := j.passes(a)
				if may := permitted(objects, a); got != may {
					t.Errorf("%s: the rules say %v, the documents %v", name, got, may)
				}
				if isolated := want[name]; isolated != "" && (isolated == "passes") != got {
					t.Errorf("%s: passes=%v, the recipe says %q", name, got, isolated)
				}
				delete(want, name)
			}
			for name := range want {
				t.Errorf("the recipe speaks of %q, which is not tried", name)
			}
			golden(t, strings.TrimSuffix(f, ".yaml")+".nft", r)
		})
	}
}

func local(places []*place) []Pod {
	var out []Pod
	for _, p := range places {
		if p.local {
			out = append(out, newPod(p.object(), p.addresses))
		}
	}
	return out
}

func title(a try) string {
	name := func(p *place) string {
		if p == nil {
			return "node"
		}
		return p.name
	}
	return name(a.from) + " " + name(a.to) + " " + a.proto + "/" + itoa(a.port)
}

func everyPair(places []*place) []try {
	var out []try
	for _, from := range append([]*place{nil}, places...) {
		for _, to := range places {
			if from == to || !to.local && (from == nil || !from.local) {
				continue
			}
			for _, proto := range []string{"tcp", "udp", "sctp"} {
				for _, port := range []int{53, 80, 5000, 5432, 8080, 9090, 32000, 32768} {
					a := try{from: from, to: to, client: addrs("10.88.0.1")[0], server: to.addresses[0],
						proto: proto, port: port}
					if from != nil {
						a.client = from.addresses[0]
					}
					out = append(out, a)
				}
			}
		}
	}
	return out
}

// recipe parses policies, and comments of the form "# client server proto/port: passes" or ": is
// denied".
func recipe(t *testing.T, text string) (policies []*networkingv1.NetworkPolicy, want map[string]string) {
	t.Helper()
	want = map[string]string{}
	for line := range strings.Lines(text) {
		if said, ok := strings.CutPrefix(line, "# "); ok {
			if name, verdict, ok := strings.Cut(strings.TrimSpace(said), ": "); ok &&
				(verdict == "passes" || verdict == "is denied") {
				want[name] = verdict
			}
		}
	}
	for doc := range strings.SplitSeq(text, "\n---\n") {
		p := &networkingv1.NetworkPolicy{}
		if err := yaml.UnmarshalStrict([]byte(doc), p); err != nil {
			t.Fatal(err)
		}
		if p.Namespace == "" {
			p.Namespace = metav1.NamespaceDefault
		}
		policies = append(policies, p)
	}
	return policies, want
}

// golden compares the transaction that creates a ruleset with a file.
func golden(t *testing.T, file string, r ruleset) {
	t.Helper()
	fake := knftables.NewFake(knftables.InetFamily, Table)
	tx := fake.NewTransaction()
	addRebuild(tx, nil, r, bridge)
	if err := fake.Run(t.Context(), tx); err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	for line := range strings.Lines(fake.Dump()) {
		// The base is the same for all.
		own := !strings.HasPrefix(line, "add table")
		for _, c := range baseChains {
			own = own && !strings.Contains(line, " "+c.name+" ")
		}
		if own {
			b.WriteString(line)
		}
	}
	if *rewrite {
		if err := os.WriteFile(file, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	was, err := os.ReadFile(file)
	if err != nil {
		t.Fatalf("%v: make it with -rewrite", err)
	}
	if string(was) != b.String() {
		t.Errorf("%s is another:\n%s", file, b.String())
	}
}

func itoa(n int) string { return strconv.Itoa(n) }

func atoi(s string) int {
	n, err := strconv.Atoi(s)
	if err != nil {
		panic(err)
	}
	return n
}
