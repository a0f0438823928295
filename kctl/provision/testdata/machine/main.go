// Command machine stands for the programs of a machine that is a folder, in tests: systemctl, the daemons and kctl, by the first
// word of its command line. Machines of one cluster share a file, in which the cluster is: replicas, nodes, tokens.
package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

type taint struct{ Key, Value, Effect string }

type node struct {
	Labels  map[string]string
	Taints  []taint
	Record  string
	Address string
	Drained bool
	Mark    string // of an upgrade that drains it
	Closed  bool   // no pods come
	Held    bool   // a pod does not leave it
	Trouble string // it is not ready, and says this
	Looks   int    // for how many more its agent says that traffic does not come to its pods
}

// replaced is a dead replica and the standby that has its vote.
type replaced struct {
	Dead    string `json:"dead"`
	Standby string `json:"standby"`
}

// cluster is what all machines know.
type cluster struct {
	Calls   int               // of all programs
	Members map[string]string // addresses
	Waiting map[string]bool   // those without a vote
	Changed []replaced        // by standbys
	Nodes   map[string]*node
	Tokens  map[string]string // what each is for: role/name, and /replace
	Made    int               // how many clusters were made
	Starts  map[string]int    // by machine and daemon
	Leader  string
	Runs    map[string]string // releases, by machine and daemon
	Done    []string          // what upgrades have done to them
	save    func()
}

var root = os.Getenv("DESTDIR")

func main() {
	shared := os.Getenv("CLUSTER")
	f, err := os.OpenFile(shared, os.O_RDWR|os.O_CREATE, 0o600)
	check(err)
	check(syscall.Flock(int(f.Fd()), syscall.LOCK_EX))
	c := cluster{}
	raw, err := os.ReadFile(shared)
	check(err)
	if len(raw) > 0 {
		check(json.Unmarshal(raw, &c))
	}
	for _, m := range []*map[string]string{&c.Members, &c.Tokens, &c.Runs} {
		if *m == nil {
			*m = map[string]string{}
		}
	}
	if c.Nodes == nil {
		c.Nodes, c.Starts = map[string]*node{}, map[string]int{}
	}
	if c.Waiting == nil {
		c.Waiting = map[string]bool{}
	}
	c.save = func() { save(f, c) }
	c.point()
	status := c.run(os.Args[1], os.Args[2:])
	save(f, c)
	os.Exit(status)
}

// point is a place at which the test may have what was asked for by ssh end, with all its processes.
func (c *cluster) point() {
	c.Calls++
	kill, _ := os.ReadFile(os.Getenv("CLUSTER") + ".kill")
	if at, err := strconv.Atoi(string(bytes.TrimSpace(kill))); err == nil && at == c.Calls {
		c.save()
		syscall.Kill(0, syscall.SIGKILL)
	}
}

func save(f *os.File, c cluster) {
	raw, err := json.MarshalIndent(c, "", " ")
	check(err)
	check(f.Truncate(0))
	_, err = f.WriteAt(raw, 0)
	check(err)
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "machine:", err)
		os.Exit(9)
	}
}

func fail(format string, args ...any) int {
	fmt.Fprintf(os.Stderr, format+"\n", args...)
	return 1
}

func (c *cluster) run(program string, args []string) int {
	switch program {
	case "systemctl":
		return c.systemctl(args)
	case "keelson-controlplane":
		if args[0] == "check" {
			return judge(program, args)
		}
		return c.replica(args)
	case "keelson-agent":
		if args[0] == "check" {
			return judge(program, args)
		}
		if slices.Contains(args, "--version") {
			fmt.Println("keelson-agent version " + os.Getenv("VERSION"))
		}
		return 0 // or remove-network
	case "kctl":
		return c.kctl(args[2:]) // behind --kubeconfig FILE
	}
	return fail("%s is not known", program)
}

// judge is 'check --config FILE' of a daemon that knows one wrong key.
func judge(program string, args []string) int {
	raw, err := os.ReadFile(args[2])
	check(err)
	for i, line := range strings.Split(string(raw), "\n") {
		if strings.HasPrefix(line, "max-pod: ") {
			return fail(`%s: %s, line %d: unknown key "max-pod": the nearest is max-pods`, program, args[2], i+1)
		}
	}
	return 0
}

func path(at ...string) string { return filepath.Join(append([]string{root}, at...)...) }

func exists(at ...string) bool {
	_, err := os.Stat(path(at...))
	return err == nil
}

func write(content string, at ...string) {
	p := path(at...)
	check(os.MkdirAll(filepath.Dir(p), 0o755))
	check(os.WriteFile(p, []byte(content), 0o600))
}

// setting is a key of a file of settings.
func setting(file, key string) string {
	raw, _ := os.ReadFile(path("etc/keelson", file))
	for line := range strings.Lines(string(raw)) {
		if v, ok := strings.CutPrefix(line, key+": "); ok {
			return strings.Trim(strings.TrimSpace(v), `"`)
		}
	}
	return ""
}

func words(list string) (out []string) {
	for w := range strings.SplitSeq(strings.Trim(list, "[]"), ",") {
		if w = strings.Trim(strings.TrimSpace(w), `"`); w != "" {
			out = append(out, w)
		}
	}
	return out
}

func (c *cluster) systemctl(args []string) int {
	verb := args[0]
	unit := strings.TrimSuffix(args[len(args)-1], ".service")
	active, enabled := path("units", unit+".active"), path("units", unit+".enabled")
	is := func(p string) int {
		if _, err := os.Stat(p); err != nil {
			return 3
		}
		return 0
	}
	switch verb {
	case "is-active":
		return is(active)
	case "is-enabled":
		return is(enabled)
	case "enable":
		write("", "units", unit+".enabled")
	case "disable":
		os.Remove(enabled)
		os.Remove(active)
	case "restart", "start":
		if !exists("usr/lib/systemd/system", unit+".service") {
			return fail("there is no unit %s", unit)
		}
		if unit == "keelson-controlplane" {
			if !exists("var/lib/keelson/controlplane/cluster.json") {
				return fail("no cluster.json")
			}
			name := setting("controlplane.yaml", "name")
			// One that was taken out of the group does not come into it by starting.
			if len(c.Members) == 0 || exists("var/lib/keelson/controlplane/peers.json") {
				c.Members[name] = setting("controlplane.yaml", "advertise-address")
				if exists("var/lib/keelson/controlplane/standby.json") {
					c.Waiting[name] = true
				}
				os.Remove(path("var/lib/keelson/controlplane/peers.json"))
			}
			for _, other := range slices.Sorted(maps.Keys(c.Members)) {
				// A leader that is stopped hands over.
				if c.Leader == "" || c.Leader == name && other != name && !c.Waiting[other] {
					c.Leader = other
				}
			}
		} else if status := c.agent(); status != 0 {
			return status
		}
		c.Starts[filepath.Base(root)+" "+unit]++
		if unit == "keelson-agent" && setting("agent.yaml", "max-pods") == "666" {
			os.Remove(active)
			return 0 // it was begun, and has ended
		}
		program, err := os.ReadFile(path("usr/bin", unit))
		check(err)
		_, release, _ := strings.Cut(string(program), "VERSION=")
		c.Runs[filepath.Base(root)+" "+unit], _, _ = strings.Cut(release, " ")
		c.Done = append(c.Done, verb+" "+filepath.Base(root)+" "+unit)
		write("", "units", unit+".active")
	}
	return 0
}

func (c *cluster) agent() int {
	name := setting("agent.yaml", "node-name")
	if !exists("var/lib/keelson/session/node.pem") {
		raw, err := os.ReadFile(path("var/lib/keelson/join-token"))
		token := strings.TrimSpace(string(raw))
		use := c.Tokens[token]
		n := c.Nodes[name]
		if err != nil || use != "node/"+name && use != "node/"+name+"/replace" || n != nil && use != "node/"+name+"/replace" {
			return fail("the token %q is for %q, and this is the node %s", token, use, name)
		}
		delete(c.Tokens, token)
		write("x", "var/lib/keelson/session/node.pem")
		write("-----BEGIN CERTIFICATE-----\nprod\n-----END CERTIFICATE-----\n", "var/lib/keelson/session/ca.crt")
		check(os.Remove(path("var/lib/keelson/join-token")))
	}
	if c.Nodes[name] == nil {
		n := &node{Labels: map[string]string{"kubernetes.io/hostname": name}, Address: words(setting("agent.yaml", "node-ip"))[0]}
		for _, l := range words(setting("agent.yaml", "node-labels")) {
			k, v, _ := strings.Cut(l, "=")
			n.Labels[k] = v
		}
		for _, t := range words(setting("agent.yaml", "taints")) {
			n.Taints = append(n.Taints, parseTaint(t))
		}
		c.Nodes[name] = n
	}
	return 0
}

func parseTaint(s string) taint {
	rest, effect, _ := strings.Cut(s, ":")
	k, v, _ := strings.Cut(rest, "=")
	return taint{k, v, effect}
}

func (c *cluster) replica(args []string) int {
	const at = "var/lib/keelson/controlplane"
	switch args[0] {
	case "--version":
		fmt.Println("keelson-controlplane version " + os.Getenv("VERSION") + "\nfeature level " + cmp.Or(os.Getenv("LEVEL"), "2"))
	case "init":
		if exists(at, "pki") {
			return fail("it belongs to a cluster already")
		}
		c.Made++
		c.Members, c.Waiting, c.Nodes, c.Changed, c.Leader = map[string]string{}, map[string]bool{}, map[string]*node{}, nil, "" // of one that was reset
		fallthrough
	case "join":
		if args[0] == "join" {
			i := slices.Index(args, "--token-file")
			raw, err := os.ReadFile(args[i+1])
			token := strings.TrimSpace(string(raw))
			if name := setting("controlplane.yaml", "name"); err != nil || c.Tokens[token] != "controlplane/"+name {
				return fail("the token %q is for %q, and this is %s", token, c.Tokens[token], name)
			}
			delete(c.Tokens, token)
			os.Remove(path(at, "standby.json"))
			if slices.Contains(args, "--standby") {
				write("{}", at, "standby.json")
			}
			write("{}", at, "peers.json")
		}
		write("-----BEGIN CERTIFICATE-----\nprod\n-----END CERTIFICATE-----\n", at, "pki/ca.crt")
		c.point() // in the middle
		if args[0] == "init" {
			ca := "Q0E=" // CA
			write(fmt.Sprintf("apiVersion: v1\nkind: Config\ncurrent-context: prod\nclusters:\n- name: prod\n  cluster: {server: \"https://%s:6443\", certificate-authority-data: %s}\n"+
				"contexts:\n- name: prod\n  context: {cluster: prod, user: keelson-admin}\nusers:\n- name: keelson-admin\n  user: {token: secret}\n", setting("controlplane.yaml", "advertise-address"), ca), at, "admin.kubeconfig")
		}
		write(`{"name":"prod","id":"c1"}`, at, "cluster.json")
	}
	return 0
}
