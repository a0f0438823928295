package plan

import (
	"net/netip"
	"os"
	"strings"
	"testing"

	"keelson.dev/keelson/deploy/machines"
)

func judgeRangesAddress(host, a string) func(*world) {
	return func(w *world) {
		for i := range w.cluster.Hosts {
			if h := &w.cluster.Hosts[i]; h.Name == host {
				h.Address = a
				f := w.facts[host]
				f.Addresses = []string{a}
				w.facts[host] = f
			}
		}
	}
}

func judgeRangesOf(host string, change func(*machines.Facts)) func(*world) {
	return func(w *world) {
		f := w.facts[host]
		change(&f)
		w.facts[host] = f
	}
}

func judgeRangesFrom(a string) func(*machines.Facts) { return func(f *machines.Facts) { f.From = a } }

func judgeRangesAsks(a ...string) func(*machines.Facts) {
	return func(f *machines.Facts) { f.Nameservers = a }
}

func judgeRangesRoutes(all ...string) func(*machines.Facts) {
	return func(f *machines.Facts) {
		for _, p := range all {
			f.Routes = append(f.Routes, machines.Network{Link: "br0", Prefix: netip.MustParsePrefix(p)})
		}
	}
}

func judgeRangesInit(flags ...string) func(*world) { return func(w *world) { w.cluster.Init = flags } }

var judgeRangesMade = judgeRangesOf("cp1", func(f *machines.Facts) { // by other ranges than the file has by now
	f.ReplicaWhole, f.ClusterName, f.ClusterID, f.ReplicaCA, f.PodRanges, f.ServiceRanges = true, "prod", "id", aCA,
		"10.7.0.0/16,fd00:7::/48", "10.8.0.0/16"
})

var judgeRangesNode = judgeRangesOf("w1", func(f *machines.Facts) { f.Node, f.NodeCA, f.NodeName = true, aCA, "w1" })

// judgeRangesCases are the cases of TestJudgeRanges.
var judgeRangesCases = []struct {
	name   string
	damage []func(*world)
	want   string // "" = nothing; E or W, and what is said with its remedy
}{
	{"elsewhere", []func(*world){judgeRangesOf("w1", judgeRangesFrom("10.2.0.1")),
		judgeRangesOf("w1", judgeRangesAsks("10.95.0.1", "fd00::1")),
		judgeRangesOf("w1", judgeRangesRoutes("10.0.0.0/8", "172.17.0.0/16"))}, ""},
	{"a worker's address", []func(*world){judgeRangesAddress("w1", "10.1.0.51")},
		"E its address 10.1.0.51 is in 10.1.0.0/16 of the cluster's pods: nodes would look for it among them -> " +
			"name a range that nobody has addresses of, as init: {cluster-cidr: ...} of the file; or give it"},
	{"a replica's address", []func(*world){judgeRangesAddress("cp2", "10.96.7.1")},
		"E its address 10.96.7.1 is in 10.96.0.0/16 of the cluster's Services: nodes would look " +
			"for it among them -> name a range that nobody has addresses of, as init: {service-cidr: ...}"},
	{"who asks by ssh", []func(*world){judgeRangesOf("w1", judgeRangesFrom("10.1.200.9"))},
		"E is reached from 10.1.200.9, which is in 10.1.0.0/16 of the cluster's pods: as a node it would send " +
			"nothing there any more -> name a range"},
	{"who asks a replica, which is no node",
		[]func(*world){judgeRangesOf("cp1", judgeRangesFrom("10.1.200.9")),
			judgeRangesOf("cp1", judgeRangesAsks("10.1.0.2")),
			judgeRangesOf("cp1", judgeRangesRoutes("10.1.2.0/24"))}, ""},
	{"a nameserver", []func(*world){judgeRangesOf("w1", judgeRangesAsks("9.9.9.9", "10.96.0.53"))},
		"E asks the nameserver 10.96.0.53, which is in 10.96.0.0/16 of the cluster's Services"},
	{"a route", []func(*world){judgeRangesOf("w1", judgeRangesRoutes("10.1.3.0/24"))},
		"E has a route to 10.1.3.0/24 by br0, which is in 10.1.0.0/16 of the cluster's pods -> name a range"},
	{"a route to a machine behind which a nameserver is",
		[]func(*world){judgeRangesOf("w1", judgeRangesRoutes("10.1.3.4/32")),
			judgeRangesOf("w1", judgeRangesAsks("10.1.3.4"))},
		"E has a route to 10.1.3.4/32"},
	{"the ranges of a file without", []func(*world){judgeRangesInit("--domain=x"),
		judgeRangesOf("w1", judgeRangesAsks("10.244.0.53"))},
		"E asks the nameserver 10.244.0.53, which is in 10.244.0.0/16"},
	{"one range of two", []func(*world){judgeRangesInit("--cluster-cidr=10.3.0.0/16,fd00:3::/48",
		"--service-cidr=10.4.0.0/16,fd00:4::/112"), judgeRangesOf("w1", judgeRangesAsks("fd00:3::53"))},
		"E asks the nameserver fd00:3::53, which is in fd00:3::/48 of the cluster's pods"},
	{"no range", []func(*world){judgeRangesInit("--cluster-cidr=x"),
		judgeRangesOf("w1", judgeRangesAsks("10.244.0.53"))}, ""},
	{"a network of others", []func(*world){judgeRangesOf("w1", judgeRangesRoutes("10.1.3.0/24")),
		judgeRangesOf("w1", judgeRangesAsks("10.1.9.9")),
		judgeRangesOf("w1", func(f *machines.Facts) { f.OtherNetwork = true })}, ""},
	{"the ranges of the cluster, not the file's",
		[]func(*world){judgeRangesMade, judgeRangesOf("w1", judgeRangesAsks("10.1.0.53"))}, ""},
	{"a further worker", []func(*world){judgeRangesMade, judgeRangesOf("w1", judgeRangesFrom("10.7.0.9"))},
		"E is reached from 10.7.0.9, which is in 10.7.0.0/16 of the cluster's pods: as a node it would send " +
			"nothing there any more -> reach it from another address"},
	{"a nameserver that may be a Service", []func(*world){judgeRangesMade,
		judgeRangesOf("w1", judgeRangesAsks("10.8.0.10"))},
		"W asks the nameserver 10.8.0.10, which is in 10.8.0.0/16 of the cluster's Services -> see that it is a " +
			"Service; else have it ask another one"},
	{"a route of a further worker", []func(*world){judgeRangesMade,
		judgeRangesOf("w1", judgeRangesRoutes("10.7.3.0/24")),
		judgeRangesOf("w1", judgeRangesFrom("10.7.3.1"))}, "W has a route to 10.7.3.0/24 by br0"},
	{"the address of a further replica", []func(*world){judgeRangesMade, judgeRangesAddress("cp2", "10.7.0.2")},
		"E its address 10.7.0.2 is in 10.7.0.0/16 of the cluster's pods: nodes would look for it among them -> " +
			"give it another address"},
	{"the address of a node", []func(*world){judgeRangesMade, judgeRangesNode, judgeRangesAddress("w1", "10.7.0.2")},
		"W its address 10.7.0.2 is in 10.7.0.0/16"},
	{"a node", []func(*world){judgeRangesMade, judgeRangesNode, judgeRangesOf("w1", judgeRangesRoutes("10.7.3.0/24")),
		judgeRangesOf("w1", judgeRangesFrom("10.7.0.9")),
		judgeRangesOf("w1", judgeRangesAsks("10.8.0.10"))}, ""},
	{"a cluster that does not say its ranges",
		[]func(*world){judgeRangesMade, judgeRangesOf("cp1", func(f *machines.Facts) {
			f.PodRanges, f.ServiceRanges = "", ""
		}), judgeRangesOf("w1", judgeRangesFrom("10.244.0.9"))}, ""},
}

// A machine that would disconnect itself or others as a node is refused before any change. For an
// existing node a warning is printed, and the command continues.
func TestJudgeRanges(t *testing.T) {
	for _, c := range judgeRangesCases {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(aCluster(3, 1))
			for _, change := range c.damage {
				change(w)
			}
			found := Inspect(w.cluster, w.seen(), w.release, w.state)
			var all []string
			for _, one := range found {
				all = append(all, map[bool]string{true: "E ", false: "W "}[one.Blocking]+one.What+" -> "+one.Remedy)
			}
			if said := strings.Join(all, "\n"); len(all) > 1 || c.want == "" && said != "" ||
				!strings.HasPrefix(said, c.want) {
				t.Errorf("said:\n%s\nwant:\n%s", said, c.want)
			}
		})
	}
}

// Which ranges a cluster has whose file names none, init says: what is judged here has to be the same.
func TestDefaultRanges(t *testing.T) {
	raw, err := os.ReadFile("../../../controlplane/server/command/command.go")
	if err != nil {
		t.Fatal(err)
	}
	for flag, is := range map[string]string{"cluster-cidr": defaultPods, "service-cidr": defaultServices} {
		if want := `"` + flag + `", "` + is + `"`; !strings.Contains(string(raw), want) {
			t.Errorf("--%s of init is not by default %s", flag, is)
		}
	}
}
