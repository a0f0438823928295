package execute

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"strings"

	"keelson.dev/keelson/deploy/machines/plan"
)

// State is what the cluster says of itself. It is not Known, with the reason, when it does not answer.
func (s *Site) State(ctx context.Context) (plan.State, error) {
	out := plan.State{}
	members, err := s.members(ctx)
	if err != nil {
		return out, err
	}
	nodes, err := s.nodes(ctx)
	if err != nil {
		return out, err
	}
	return plan.State{Known: true, Members: members, Nodes: nodes}, nil
}

func (s *Site) members(ctx context.Context) (map[string]plan.Member, error) {
	raw, err := s.kctl(ctx, apiLimit, "cluster", "status", "-o", "json", "--request-timeout=30s")
	if err != nil {
		return nil, err
	}
	var status struct {
		Members []struct {
			Name    string `json:"name"`
			Address string `json:"address"`
			Voter   bool   `json:"voter"`
			Leader  bool   `json:"leader"`
			Ready   string `json:"ready"`
		} `json:"members"`
	}
	if err := json.Unmarshal([]byte(raw), &status); err != nil {
		return nil, fmt.Errorf("what 'kctl cluster status' says: %w", err)
	}
	out := map[string]plan.Member{}
	for _, m := range status.Members {
		host, _, err := net.SplitHostPort(m.Address)
		if err != nil {
			host = m.Address
		}
		out[m.Name] = plan.Member{Address: host, Voter: m.Voter, Leader: m.Leader, Ready: m.Ready}
	}
	return out, nil
}

// nodePath prints what is needed of each Node, a line each: with all that Nodes say, a thousand would be too much.
const nodePath = `jsonpath={range .items[*]}{.metadata.name}{"\t"}{.metadata.labels}{"\t"}{.spec.taints}{"\t"}{.metadata.annotations.keelson\.dev/cluster-file}{"\t"}` +
	`{.status.addresses}{"\t"}{.status.conditions[?(@.type=="Ready")].status}{"\t"}{.status.conditions[?(@.type=="Ready")].message}{"\t"}{.spec.unschedulable}{"\n"}{end}`

func (s *Site) nodes(ctx context.Context) (map[string]plan.Node, error) {
	raw, err := s.kctl(ctx, apiLimit, "get", "nodes", "-o", nodePath, "--request-timeout=30s")
	if err != nil {
		return nil, err
	}
	return parseNodes(raw)
}

func parseNodes(raw string) (map[string]plan.Node, error) {
	out := map[string]plan.Node{}
	lines := bufio.NewScanner(strings.NewReader(raw))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		cells := strings.Split(lines.Text(), "\t")
		if lines.Text() == "" || len(cells) != 8 {
			continue // the end of a message of several lines
		}
		n := plan.Node{Record: cells[3], Ready: cells[5] == "True", Why: cells[6], Unschedulable: cells[7] == "true"}
		var taints []struct{ Key, Value, Effect string }
		var addresses []struct{ Type, Address string }
		for _, of := range []struct {
			cell string
			to   any
		}{{cells[1], &n.Labels}, {cells[2], &taints}, {cells[4], &addresses}} {
			if of.cell == "" {
				continue
			}
			if err := json.Unmarshal([]byte(of.cell), of.to); err != nil {
				return nil, fmt.Errorf("what 'kctl get nodes' says of %s: %w", cells[0], err)
			}
		}
		for _, t := range taints {
			if t.Value != "" {
				t.Key += "=" + t.Value
			}
			n.Taints = append(n.Taints, t.Key+":"+t.Effect)
		}
		for _, a := range addresses {
			if a.Type == "InternalIP" && n.Address == "" {
				n.Address = a.Address
			}
		}
		out[cells[0]] = n
	}
	return out, lines.Err()
}
