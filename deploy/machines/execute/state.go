package execute

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strings"

	"keelson.dev/keelson/deploy/machines/plan"
)

// State is what the cluster says of itself. It is not Known, with the reason, when it does not answer.
func (s *Site) State(ctx context.Context) (plan.State, error) {
	status, err := s.status(ctx)
	if err == nil && status.Leader == "" {
		err = errors.New("no replica leads")
	}
	if err != nil {
		return plan.State{}, err
	}
	nodes, err := s.nodes(ctx)
	if err != nil {
		return plan.State{}, err
	}
	out := plan.State{Known: true, Level: status.Level, Members: status.members(), Nodes: nodes, Replaced: map[string]string{}}
	for _, d := range status.Autopilot.Done {
		out.Replaced[d.Dead] = d.Standby
	}
	return out, nil
}

// status is what is needed of what 'kctl cluster status' says.
type status struct {
	Leader    string `json:"leader"`
	Level     uint32 `json:"featureLevel"`
	Autopilot struct {
		Done []struct {
			Dead    string `json:"dead"`
			Standby string `json:"standby"`
		} `json:"done"`
	} `json:"autopilot"`
	Members []struct {
		Name    string `json:"name"`
		Address string `json:"address"`
		Voter   bool   `json:"voter"`
		Standby bool   `json:"standby"`
		Leader  bool   `json:"leader"`
		Ready   string `json:"ready"`
	} `json:"members"`
}

// status is what the first replica says that knows of a leader, or else the first that says anything: one that was taken out of
// the group while it was away has members and nodes as they were.
func (s *Site) status(ctx context.Context) (status, error) {
	var errs []error
	var leaderless *status
	for _, name := range s.administrators() {
		one, err := s.statusAt(ctx, name)
		if err != nil {
			errs = append(errs, err)
			if ctx.Err() != nil {
				break
			}
			continue
		}
		s.mu.Lock()
		s.lost[name] = one.Leader == ""
		s.mu.Unlock()
		if one.Leader != "" {
			return one, nil
		}
		if leaderless == nil {
			leaderless = &one
		}
	}
	switch {
	case leaderless != nil:
		return *leaderless, nil
	case len(errs) == 0:
		return status{}, errNobody
	}
	return status{}, errors.Join(errs...)
}

func (s *Site) statusAt(ctx context.Context, name string) (out status, err error) {
	raw, err := s.kctlAt(ctx, []string{name}, apiLimit, "cluster", "status", "-o", "json", "--request-timeout=30s")
	if err != nil {
		return out, err
	}
	if err := json.Unmarshal([]byte(raw), &out); err != nil {
		return out, fmt.Errorf("what 'kctl cluster status' says: %w", err)
	}
	return out, nil
}

func (s *Site) members(ctx context.Context) (map[string]plan.Member, error) {
	status, err := s.status(ctx)
	if err != nil {
		return nil, err
	}
	return status.members(), nil
}

func (s status) members() map[string]plan.Member {
	out := map[string]plan.Member{}
	for _, m := range s.Members {
		host, _, err := net.SplitHostPort(m.Address)
		if err != nil {
			host = m.Address
		}
		out[m.Name] = plan.Member{Address: host, Voter: m.Voter, Standby: m.Standby, Leader: m.Leader, Ready: m.Ready}
	}
	return out
}

// nodePath prints what is needed of each Node, a line each: with all that Nodes say, a thousand would be too much. What may hold any
// text is printed as JSON, in which a line stays one.
const nodePath = `jsonpath={range .items[*]}{.metadata.name}{"\t"}{.metadata.labels}{"\t"}{.spec.taints}{"\t"}{.metadata.annotations.keelson\.dev/cluster-file}{"\t"}` +
	`{.status.addresses}{"\t"}{.status.conditions[?(@.type=="Ready")]}{"\t"}{.spec.unschedulable}{"\t"}` +
	`{.status.conditions[?(@.type=="NetworkUnavailable")]}{"\n"}{end}`

// partFailed is the reason by which an agent says that routes or rules of Services are not in place. The condition may be another's: of
// a network product, which tells of itself and may be waiting for what is installed after the cluster.
const partFailed = "NetworkPartFailed"

func (s *Site) nodes(ctx context.Context) (map[string]plan.Node, error) {
	raw, err := s.kctl(ctx, apiLimit, "get", "nodes", "-o", nodePath, "--request-timeout=30s")
	if err != nil {
		return nil, err
	}
	return parseNodes(raw)
}

func parseNodes(raw string) (map[string]plan.Node, error) {
	out := map[string]plan.Node{}
	for line := range strings.SplitSeq(raw, "\n") {
		if line == "" {
			continue
		}
		cells := strings.Split(line, "\t")
		if len(cells) != 8 {
			return nil, fmt.Errorf("what 'kctl get nodes' says: a line of %d parts, want 8: %.100q. A Node whose annotation keelson.dev/cluster-file is not as 'kctl cluster up' wrote it says such a thing: take it off", len(cells), line)
		}
		n := plan.Node{Record: cells[3], Unschedulable: cells[6] == "true"}
		var taints []struct{ Key, Value, Effect string }
		var addresses []struct{ Type, Address string }
		var ready, network struct{ Status, Reason, Message string }
		for _, of := range []struct {
			cell string
			to   any
		}{{cells[1], &n.Labels}, {cells[2], &taints}, {cells[4], &addresses}, {cells[5], &ready}, {cells[7], &network}} {
			if of.cell == "" {
				continue
			}
			if err := json.Unmarshal([]byte(of.cell), of.to); err != nil {
				return nil, fmt.Errorf("what 'kctl get nodes' says of %s: %w", cells[0], err)
			}
		}
		n.Ready, n.Why = ready.Status == "True", ready.Message
		if network.Status == "True" && network.Reason == partFailed {
			n.Network = network.Message
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
	return out, nil
}
