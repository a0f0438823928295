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

// State returns the state of the cluster, which it reads from 'kctl cluster status' and from the
// Nodes. If the cluster does not respond or has no leader, the state is the zero value, and the
// error is the reason.
func (s *Site) State(ctx context.Context) (plan.State, error) {
	status, err := s.queryStatus(ctx)
	if err == nil && status.Leader == "" {
		err = errors.New("no replica leads")
	}
	if err != nil {
		return plan.State{}, err
	}
	nodes, err := s.queryNodes(ctx)
	if err != nil {
		return plan.State{}, err
	}
	out := plan.State{Known: true, Level: status.Level, Members: status.membersByName(), Nodes: nodes,
		Replaced: map[string]string{}}
	for _, d := range status.Autopilot.Done {
		out.Replaced[d.Dead] = d.Standby
	}
	return out, nil
}

// clusterStatus contains the fields of the JSON output of 'kctl cluster status' that this package
// uses.
type clusterStatus struct {
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

// queryStatus returns the cluster status of the first replica that reports a leader. If no replica
// reports a leader, it returns the status of the first replica that responds. A replica without a
// leader may have been removed from the raft cluster while it was down. The members and nodes in
// its status are then outdated.
func (s *Site) queryStatus(ctx context.Context) (clusterStatus, error) {
	var errs []error
	var leaderless *clusterStatus
	for _, name := range s.adminMachines() {
		one, err := s.queryStatusOn(ctx, name)
		if err != nil {
			errs = append(errs, err)
			if ctx.Err() != nil {
				break
			}
			continue
		}
		s.mu.Lock()
		s.leaderless[name] = one.Leader == ""
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
		return clusterStatus{}, errNoAdmin
	}
	return clusterStatus{}, errors.Join(errs...)
}

func (s *Site) queryStatusOn(ctx context.Context, name string) (out clusterStatus, err error) {
	raw, err := s.runKctlOn(ctx, []string{name}, apiTimeout, "cluster", "status", "-o", "json", "--request-timeout=30s")
	if err != nil {
		return out, err
	}
	if err := json.Unmarshal([]byte(raw), &out); err != nil {
		return out, fmt.Errorf("what 'kctl cluster status' says: %w", err)
	}
	return out, nil
}

func (s *Site) queryMembers(ctx context.Context) (map[string]plan.Member, error) {
	status, err := s.queryStatus(ctx)
	if err != nil {
		return nil, err
	}
	return status.membersByName(), nil
}

func (s clusterStatus) membersByName() map[string]plan.Member {
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

// nodeJSONPath is an output format of 'kctl get nodes' with one line for each Node and only the
// fields that this package uses. The complete output would be too large for a thousand nodes.
// Fields that can contain any text are printed as JSON, so that they contain no line breaks.
const nodeJSONPath = `jsonpath={range ` +
	`.items[*]}{.metadata.name}{"\t"}{.metadata.labels}{"\t"}{.spec.taints}{"\t"}{.metadata.annotations.keelson\.dev/cluster-file}{"\t"}` +
	`{.status.addresses}{"\t"}{.status.conditions[?(@.type=="Ready")]}{"\t"}{.spec.unschedulable}{"\t"}` +
	`{.status.conditions[?(@.type=="NetworkUnavailable")]}{"\n"}{end}`

// reasonPartFailed is the reason of the Node condition NetworkUnavailable that the agent sets if
// routes or Service rules are missing. Other network products set the condition with other reasons.
const reasonPartFailed = "NetworkPartFailed"

func (s *Site) queryNodes(ctx context.Context) (map[string]plan.Node, error) {
	raw, err := s.runKctl(ctx, apiTimeout, "get", "nodes", "-o", nodeJSONPath, "--request-timeout=30s")
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
			return nil,
				fmt.Errorf("what 'kctl get nodes' says: a line of %d parts, want 8: %.100q. A Node whose annotation "+
					"keelson.dev/cluster-file is not as 'kctl cluster up' wrote it says such a thing: take it off",
					len(cells), line)
		}
		n := plan.Node{Record: cells[3], Unschedulable: cells[6] == "true"}
		var taints []struct{ Key, Value, Effect string }
		var addresses []struct{ Type, Address string }
		var ready, network struct{ Status, Reason, Message string }
		for _, of := range []struct {
			cell string
			to   any
		}{{cells[1], &n.Labels}, {cells[2], &taints}, {cells[4], &addresses}, {cells[5], &ready},
			{cells[7], &network}} {
			if of.cell == "" {
				continue
			}
			if err := json.Unmarshal([]byte(of.cell), of.to); err != nil {
				return nil, fmt.Errorf("what 'kctl get nodes' says of %s: %w", cells[0], err)
			}
		}
		n.Ready, n.Why = ready.Status == "True", ready.Message
		if network.Status == "True" && network.Reason == reasonPartFailed {
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
