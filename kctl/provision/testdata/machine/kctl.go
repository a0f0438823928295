package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// kctl answers a kctl command about the cluster. It fails on a machine without a running replica.
func (c *cluster) kctl(args []string) int {
	if !exists("units/keelson-controlplane.active") {
		return fail("connection refused")
	}
	if exists("locked-out") {
		return fail("error: You must be logged in to the server (Unauthorized)")
	}
	mine := setting("controlplane.yaml", "name")
	out := c.Members[mine] == "" // it was taken out, and knows the members of before and no leader
	if out && strings.Join(args[:2], " ") != "cluster status" {
		return fail("there is no leader")
	}
	switch strings.Join(args[:2], " ") {
	case "cluster status":
		type member struct {
			Name    string `json:"name"`
			Address string `json:"address"`
			Voter   bool   `json:"voter"`
			Standby bool   `json:"standby"`
			Ready   string `json:"ready"`
			Version string `json:"version"`
		}
		var all struct {
			Leader string `json:"leader"`
			Pilot  struct {
				Done []replaced `json:"done"`
			} `json:"autopilot"`
			Level   int      `json:"featureLevel"`
			Members []member `json:"members"`
		}
		all.Leader, all.Level, all.Pilot.Done = c.Leader, 2, c.Changed
		if out {
			all.Leader, all.Pilot.Done = "", nil
			all.Members = append(all.Members, member{mine, "192.0.2.99:6445", true, false, "no: there is no leader", ""})
			return print(all)
		}
		for _, name := range slices.Sorted(maps.Keys(c.Members)) {
			all.Members = append(all.Members, member{name, c.Members[name] + ":6445", !c.Waiting[name], c.Waiting[name], "yes", c.Runs[name+" keelson-controlplane"]})
		}
		return print(all)
	case "cluster token":
		role, name := args[slices.Index(args, "--role")+1], args[slices.Index(args, "--names")+1]
		use := role + "/" + name
		if slices.Contains(args, "--replace") {
			use += "/replace"
		}
		token := fmt.Sprintf("keelson1.%s.%d", role, c.Calls)
		c.Tokens[token] = use
		fmt.Println(token)
	case "cluster member":
		if c.Members[args[3]] == "" {
			return fail("there is no member %s", args[3])
		}
		delete(c.Members, args[3])
		delete(c.Waiting, args[3])
	case "cluster step-down":
		c.Leader = args[3]
		c.Done = append(c.Done, "lead "+c.Leader)
	case "patch node":
		return c.patch(c.Nodes[args[2]], args[2], args[5])
	case "get nodes":
		if strings.Contains(args[3], "containerRuntimeVersion") {
			for _, name := range slices.Sorted(maps.Keys(c.Nodes)) {
				n := c.Nodes[name]
				closed := ""
				if n.Closed {
					closed = "true"
				}
				fmt.Printf("%s\tkeelson://%s\t%s\t%s\t{\"type\":\"Ready\",\"status\":\"True\"}\t\t\n", name, strings.TrimPrefix(c.Runs[name+" keelson-agent"], "v"), n.Mark, closed)
			}
			return 0
		}
		for _, name := range slices.Sorted(maps.Keys(c.Nodes)) {
			n := c.Nodes[name]
			labels, _ := json.Marshal(n.Labels)
			taints := []map[string]string{}
			for _, t := range n.Taints {
				taints = append(taints, map[string]string{"key": t.Key, "value": t.Value, "effect": t.Effect})
			}
			raw, _ := json.Marshal(taints)
			ready, _ := json.Marshal(map[string]string{"type": "Ready", "status": map[bool]string{true: "True", false: "False"}[n.Trouble == ""], "message": n.Trouble})
			network := `{"type":"NetworkUnavailable","status":"False","reason":"NetworkReady"}`
			if n.Looks > 0 {
				n.Looks--
				network = `{"type":"NetworkUnavailable","status":"True","reason":"NetworkPartFailed","message":"routes: no vxlan"}`
			}
			fmt.Printf("%s\t%s\t%s\t%s\t[{\"address\":%q,\"type\":\"InternalIP\"}]\t%s\t\t%s\n", name, labels, raw, n.Record, n.Address, ready, network)
		}
	case "delete node":
		delete(c.Nodes, args[2])
	default:
		return c.change(args)
	}
	return 0
}

// patch is what an upgrade writes into a node.
func (c *cluster) patch(n *node, name, merge string) int {
	var p struct {
		Spec     struct{ Unschedulable bool }
		Metadata struct{ Annotations map[string]*string }
	}
	if n == nil {
		return fail("there is no node %s", name)
	}
	check(json.Unmarshal([]byte(merge), &p))
	n.Closed, n.Mark = p.Spec.Unschedulable, ""
	if mark := p.Metadata.Annotations["keelson.dev/upgrade-drain"]; mark != nil {
		n.Mark = *mark
	}
	c.Done = append(c.Done, fmt.Sprintf("%s closed %v %s", name, n.Closed, n.Mark))
	return 0
}

// change is of one node: drain, cordon, label, taint, annotate.
func (c *cluster) change(args []string) int {
	if args[0] == "drain" {
		n := c.Nodes[args[1]]
		if n == nil {
			return fail("there is no node %s", args[1])
		}
		if n.Held {
			c.Done = append(c.Done, "drain "+args[1])
			return fail(`error: unable to drain node "%s" due to error: global timeout reached: 10m0s, continuing command...`, args[1])
		}
		n.Drained = true
		return 0
	}
	if args[0] == "cordon" {
		n := c.Nodes[args[1]]
		if n == nil {
			return fail("there is no node %s", args[1])
		}
		n.Closed = true
		c.Done = append(c.Done, "cordon "+args[1])
		return 0
	}
	n := c.Nodes[args[2]]
	if n == nil {
		return fail("there is no node %s", args[2])
	}
	for _, w := range args[4:] { // behind --overwrite
		gone, away := strings.CutSuffix(w, "-")
		k, v, _ := strings.Cut(w, "=")
		switch args[0] {
		case "label":
			if away {
				delete(n.Labels, gone)
			} else {
				n.Labels[k] = v
			}
		case "annotate":
			if n.Record = v; away {
				n.Record = ""
			}
		case "taint":
			t := parseTaint(strings.TrimSuffix(w, "-"))
			n.Taints = slices.DeleteFunc(n.Taints, func(is taint) bool { return is.Key == t.Key && is.Effect == t.Effect })
			if !away {
				n.Taints = append(n.Taints, t)
			}
		}
	}
	return 0
}

func print(v any) int {
	raw, err := json.Marshal(v)
	check(err)
	fmt.Println(string(raw))
	return 0
}
