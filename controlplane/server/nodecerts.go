package server

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/nodegateway"
)

func describeNodeCertificate(node string, c nodegateway.NodeCertificate) api.ClusterCertificate {
	return api.ClusterCertificate{Use: c.Use, Holder: node, Node: true, Subject: api.NodeUserPrefix + node, Key: c.Key,
		Begins: c.Begins.Unix(), Expires: c.Expires.Unix(), Renews: c.RenewsAt().Unix()}
}

// newestOfNodes leaves one certificate for each use of each node: that which began last. Replicas to which a node has
// connections, but not its session, tell of the ones with which those were made.
func newestOfNodes(all []api.ClusterCertificate) []api.ClusterCertificate {
	type id struct{ holder, use string }
	newest := map[id]api.ClusterCertificate{}
	for _, c := range all {
		if !c.Node {
			continue
		}
		if was, ok := newest[id{c.Holder, c.Use}]; !ok || cmp.Or(cmp.Compare(was.Begins, c.Begins), cmp.Compare(was.Expires, c.Expires)) < 0 {
			newest[id{c.Holder, c.Use}] = c
		}
	}
	all = slices.DeleteFunc(all, func(c api.ClusterCertificate) bool { return c.Node })
	return slices.AppendSeq(all, maps.Values(newest))
}

// alarmNotRenewed is the kind of the alarm about nodes that do not renew their certificates.
const alarmNotRenewed = "not renewed"

// notRenewedShown bounds how many certificates the alarm names.
const notRenewedShown = 5

// overdueAlarms is an alarm when nodes have not renewed certificates in time: a tenth of their life after they should have,
// which is more than agents take to spread it. Of certificates that the agent does not tell of itself nothing is known.
func overdueAlarms(of map[string][]nodegateway.NodeCertificate, now time.Time) []api.ClusterAlarm {
	type late struct {
		node string
		nodegateway.NodeCertificate
		since time.Time
	}
	var all []late
	for node, has := range of {
		for _, c := range has {
			since := c.RenewsAt().Add(c.Expires.Sub(c.Begins) / 10)
			if c.Told && !now.Before(since) {
				all = append(all, late{node, c, since})
			}
		}
	}
	if len(all) == 0 {
		return nil
	}
	slices.SortFunc(all, func(a, b late) int {
		return cmp.Or(a.Expires.Compare(b.Expires), cmp.Compare(a.node, b.node), cmp.Compare(a.Use, b.Use))
	})
	out := api.ClusterAlarm{Kind: alarmNotRenewed, Since: all[0].since.UnixMilli(),
		Remedy: fmt.Sprintf("on %[1]s, 'journalctl -u keelson-agent' says why: its folder /var/lib/keelson may be full or not writable. A node whose own "+
			"certificate (agent) has ended comes back with a token of 'kctl cluster token create --names %[1]s --replace'", all[0].node)}
	var names []string
	for i, c := range all {
		out.Since = min(out.Since, c.since.UnixMilli())
		if i < notRenewedShown {
			names = append(names, fmt.Sprintf("%s (%s) ends %s", c.node, c.Use, c.Expires.UTC().Format(time.RFC3339)))
		}
	}
	if more := len(all) - len(names); more > 0 {
		names = append(names, fmt.Sprintf("and %d more", more))
	}
	out.Message = fmt.Sprintf("%d certificates of nodes were not renewed in time: %s", len(all), strings.Join(names, ", "))
	return []api.ClusterAlarm{out}
}

// nodeAlarms are the alarms that a replica raises for the nodes that have their session with it.
func nodeAlarms(part *api.ClusterStatus) (out []api.ClusterAlarm) {
	for _, a := range part.Alarms {
		if a.Kind == alarmNotRenewed {
			out = append(out, a)
		}
	}
	return out
}
