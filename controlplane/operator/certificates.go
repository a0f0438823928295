package operator

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/clusterhttp"
)

// maxCertificatesBytes is the maximum size of a replica's response with certificates. The
// certificates of a node need about 500 bytes.
const maxCertificatesBytes = 8 << 20

// serveCertificates answers GET /cluster/certificates with the certificates of all replicas and
// nodes. With ?local=true, it answers with those that this replica has.
func (v *API) serveCertificates(w http.ResponseWriter, req *http.Request) {
	if !requireMethod(w, req, http.MethodGet) {
		return
	}
	out := api.ClusterCertificates{Certificates: v.config.Certificates.List(), Silent: map[string]string{}}
	for _, c := range v.config.Nodes.Certificates() {
		out.Certificates = append(out.Certificates, describeNodeCertificate(c))
	}
	if local, _ := strconv.ParseBool(req.URL.Query().Get("local")); !local {
		v.collectCertificates(req.Context(), &out)
	}
	slices.SortFunc(out.Certificates, func(a, b api.ClusterCertificate) int {
		return cmp.Or(cmp.Compare(sortRank(a), sortRank(b)), cmp.Compare(a.Use, b.Use), cmp.Compare(a.Holder, b.Holder),
			cmp.Compare(a.Expires, b.Expires))
	})
	clusterhttp.WriteJSON(w, out)
}

// sortRank returns the position of a certificate in the list: CAs are first, certificates of nodes
// are last.
func sortRank(c api.ClusterCertificate) int {
	switch {
	case c.Authority:
		return 0
	case c.Node:
		return 2
	}
	return 1
}

// collectCertificates requests the certificates of the other members and adds them to all.
func (v *API) collectCertificates(ctx context.Context, all *api.ClusterCertificates) {
	ctx, cancel := context.WithTimeout(ctx, clusterhttp.StatusTimeout)
	defer cancel()
	var mu sync.Mutex
	var pending sync.WaitGroup
	for _, m := range v.config.Store.Status().Members {
		if m.ID == v.config.Self.Name {
			continue
		}
		pending.Go(func() {
			report, err := v.fetchCertificates(ctx, m.Address)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				all.Silent[m.ID] = clusterhttp.Reason(err)
				return
			}
			all.Certificates = append(all.Certificates, report.Certificates...)
		})
	}
	pending.Wait()
	all.Certificates = newestNodeCertificates(all.Certificates)
}

func (v *API) fetchCertificates(ctx context.Context, peer string) (report api.ClusterCertificates, err error) {
	resp, err := v.config.Peers.GetFromPeer(ctx, peer, api.PathClusterCertificates+"?local=true")
	if err != nil {
		return report, err
	}
	err = clusterhttp.ReadJSON(resp, maxCertificatesBytes, "its release does not report its certificates", &report)
	return report, err
}

func describeNodeCertificate(c NodeCertificate) api.ClusterCertificate {
	return api.ClusterCertificate{Use: c.Use, Holder: c.Node, Node: true,
		Subject: api.NodeUserPrefix + c.Node, Key: c.Key,
		Begins: c.Starts.Unix(), Expires: c.Expires.Unix(), Renews: c.Renewal.Unix()}
}

// newestNodeCertificates returns the certificates in all, with only the newest certificate for each
// use of each node. A replica without the session of a node may report an older certificate, which
// it observed on a connection.
func newestNodeCertificates(all []api.ClusterCertificate) []api.ClusterCertificate {
	type id struct{ holder, use string }
	newest := map[id]api.ClusterCertificate{}
	for _, c := range all {
		if !c.Node {
			continue
		}
		if known, ok := newest[id{c.Holder, c.Use}]; !ok ||
			cmp.Or(cmp.Compare(known.Begins, c.Begins), cmp.Compare(known.Expires, c.Expires)) < 0 {
			newest[id{c.Holder, c.Use}] = c
		}
	}
	all = slices.DeleteFunc(all, func(c api.ClusterCertificate) bool { return c.Node })
	return slices.AppendSeq(all, maps.Values(newest))
}

// expiryNotice is how long before a CA expires an alarm about it is raised.
const expiryNotice = 90 * 24 * time.Hour

// expiringAlarms returns an alarm for each CA in all that expires within expiryNotice. Other
// certificates are renewed automatically.
func expiringAlarms(all []api.ClusterCertificate, now time.Time) (alarms []api.ClusterAlarm) {
	for _, c := range all {
		expires := time.Unix(c.Expires, 0)
		if !c.Authority || now.Before(expires.Add(-expiryNotice)) {
			continue
		}
		remedy := "'kctl cluster rotate cluster-ca'"
		switch {
		case c.Use == UseFrontProxy:
			remedy += ": it renews the CA of the front proxy, too"
		case c.Use == UseCluster && !c.Signs:
			remedy = "'kctl cluster rotate --status' shows the reason why the rotation waits"
		case c.Use == UsePeers && !c.Signs:
			remedy = fmt.Sprintf("'keelson-controlplane peer-ca prune' on %s, once every replica uses another CA",
				c.Holder)
		case c.Use == UsePeers:
			remedy = "'kctl cluster rotate peers-ca', or by hand 'keelson-controlplane peer-ca create', then trust, " +
				"use and prune on every replica"
		}
		alarms = append(alarms, api.ClusterAlarm{Kind: "expiring", Member: c.Holder,
			Since: expires.Add(-expiryNotice).UnixMilli(), Remedy: remedy,
			Message: fmt.Sprintf("the CA %s (%s, key %s) expires %s", c.Subject, c.Use, c.Key,
				expires.UTC().Format(time.RFC3339))})
	}
	return alarms
}

// alarmNotRenewed is the kind of the alarm about nodes that do not renew their certificates.
const alarmNotRenewed = "not renewed"

// maxOverdueShown is the maximum number of certificates that the alarm about overdue renewals
// lists.
const maxOverdueShown = 5

// overdueAlarms returns an alarm if nodes have not renewed their certificates in time. A renewal is
// late when a tenth of the certificate's lifetime has passed since its renewal time. Agents spread
// the renewals over less time. Certificates that agents have not reported themselves are ignored.
func overdueAlarms(all []NodeCertificate, now time.Time) []api.ClusterAlarm {
	since := func(c NodeCertificate) time.Time { return c.Renewal.Add(c.Expires.Sub(c.Starts) / 10) }
	var overdue []NodeCertificate
	for _, c := range all {
		if c.Reported && !now.Before(since(c)) {
			overdue = append(overdue, c)
		}
	}
	if len(overdue) == 0 {
		return nil
	}
	slices.SortFunc(overdue, func(a, b NodeCertificate) int {
		return cmp.Or(a.Expires.Compare(b.Expires), cmp.Compare(a.Node, b.Node), cmp.Compare(a.Use, b.Use))
	})
	alarm := api.ClusterAlarm{Kind: alarmNotRenewed, Since: since(overdue[0]).UnixMilli(),
		Remedy: fmt.Sprintf("on %[1]s, 'journalctl -u keelson-agent' shows the reason: its folder /var/lib/keelson "+
			"may be full or not writable. A node whose own "+
			"certificate (agent) has expired joins again with a token of 'kctl cluster token create --names %[1]s "+
			"--replace'", overdue[0].Node)}
	var names []string
	for i, c := range overdue {
		alarm.Since = min(alarm.Since, since(c).UnixMilli())
		if i < maxOverdueShown {
			names = append(names, fmt.Sprintf("%s (%s) expires %s", c.Node, c.Use,
				c.Expires.UTC().Format(time.RFC3339)))
		}
	}
	if more := len(overdue) - len(names); more > 0 {
		names = append(names, fmt.Sprintf("and %d more", more))
	}
	alarm.Message = fmt.Sprintf("%d certificates of nodes were not renewed in time: %s", len(overdue),
		strings.Join(names, ", "))
	return []api.ClusterAlarm{alarm}
}

// nodeAlarms returns those alarms in report, the status of one replica, that concern nodes with a
// session on that replica.
func nodeAlarms(report *api.ClusterStatus) (alarms []api.ClusterAlarm) {
	for _, a := range report.Alarms {
		if a.Kind == alarmNotRenewed {
			alarms = append(alarms, a)
		}
	}
	return alarms
}
