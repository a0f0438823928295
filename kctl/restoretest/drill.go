// Package restoretest compares what a restored backup serves with what the backup says that it holds, and with the cluster that
// it is of. It is pure: objects were read by who calls it.
package restoretest

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
)

// Object is one object as an API server gave it.
type Object struct {
	Revision uint64            // its resourceVersion
	Sum      [sha256.Size]byte // of what it says
}

// Kind is one resource, as it was found on both sides.
type Kind struct {
	Name     string // pods, deployments.apps
	Held     int    // objects in the backup
	Expiring int    // how many of them end by themselves, so that they may be gone
	Restored map[string]Object
	Live     map[string]Object // nil where the cluster was not asked
	Problem  string            // why one side could not be read; "" = it was
}

// Row is what became of one kind.
type Row struct {
	Name     string   `json:"name"`
	Held     int      `json:"backup"` // objects in the backup
	Restored int      `json:"restored"`
	Live     int      `json:"cluster"`
	Asked    bool     `json:"clusterAsked"`
	Same     int      `json:"same"`            // objects that are alike in both
	Since    int      `json:"since"`           // objects that the cluster has made, changed or removed since the backup
	Wrong    []string `json:"wrong,omitempty"` // what must not be, a sentence each
}

// mostWrong bounds how many objects of a kind are named.
const mostWrong = 5

// Compare judges one kind. An object that the cluster has not changed since the revision of the backup must be in it, and
// say the same; whatever is in the backup must be served, and none of it newer than the backup.
func Compare(k Kind, backup uint64) Row {
	r := Row{Name: k.Name, Held: k.Held, Restored: len(k.Restored), Live: len(k.Live), Asked: k.Live != nil}
	if k.Problem != "" {
		r.Wrong = append(r.Wrong, k.Problem)
		return r
	}
	var wrong []string
	if lost := k.Held - len(k.Restored); lost < 0 || lost > k.Expiring {
		r.Wrong = append(r.Wrong, fmt.Sprintf("the backup holds %d objects, and %d are served", k.Held, len(k.Restored)))
	}
	for _, name := range slices.Sorted(maps.Keys(k.Restored)) {
		if o := k.Restored[name]; o.Revision > backup {
			wrong = append(wrong, fmt.Sprintf("%s is of revision %d, and the backup of %d", name, o.Revision, backup))
		}
		if _, there := k.Live[name]; r.Asked && !there {
			r.Since++
		}
	}
	mayBeGone := k.Expiring
	for _, name := range slices.Sorted(maps.Keys(k.Live)) {
		live, restored := k.Live[name], k.Restored[name]
		_, there := k.Restored[name]
		switch {
		case live.Revision > backup:
			r.Since++
		case !there && mayBeGone > 0:
			mayBeGone--
			r.Since++
		case !there:
			wrong = append(wrong, fmt.Sprintf("%s is in the cluster since revision %d, and not in the backup of %d", name, live.Revision, backup))
		case live.Revision != restored.Revision:
			wrong = append(wrong, fmt.Sprintf("%s is of revision %d in the cluster and of %d in the backup", name, live.Revision, restored.Revision))
		case live.Sum != restored.Sum:
			wrong = append(wrong, fmt.Sprintf("%s says something else in the cluster, at the same revision %d", name, live.Revision))
		default:
			r.Same++
		}
	}
	if more := len(wrong) - mostWrong; more > 0 {
		wrong = append(wrong[:mostWrong], fmt.Sprintf("and %d more", more))
	}
	r.Wrong = append(r.Wrong, wrong...)
	return r
}

// Good says that nothing is wrong.
func Good(rows []Row) bool {
	return !slices.ContainsFunc(rows, func(r Row) bool { return len(r.Wrong) > 0 })
}

// Print writes a table of the kinds of which there is something, and below it what is wrong.
func Print(w io.Writer, rows []Row) error {
	rows = slices.DeleteFunc(slices.Clone(rows), func(r Row) bool {
		return r.Held+r.Restored+r.Live == 0 && len(r.Wrong) == 0
	})
	slices.SortFunc(rows, func(a, b Row) int { return cmp.Compare(a.Name, b.Name) })
	t := tabwriter.NewWriter(w, 0, 8, 3, ' ', 0)
	fmt.Fprintln(t, "KIND\tBACKUP\tRESTORED\tCLUSTER\tSAME\tSINCE\tVERDICT")
	for _, r := range rows {
		live, same, since := "-", "-", "-"
		if r.Asked {
			live, same, since = strconv.Itoa(r.Live), strconv.Itoa(r.Same), strconv.Itoa(r.Since)
		}
		verdict := "good"
		if len(r.Wrong) > 0 {
			verdict = "WRONG"
		}
		fmt.Fprintf(t, "%s\t%d\t%d\t%s\t%s\t%s\t%s\n", r.Name, r.Held, r.Restored, live, same, since, verdict)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, r := range rows {
		for _, s := range r.Wrong {
			if _, err := fmt.Fprintf(w, "%s: %s\n", r.Name, s); err != nil {
				return err
			}
		}
	}
	return nil
}

// Read makes an Object of one of the items of a list. When a node was heard counts for nothing: that lies in no store, and
// the API server adds it as it reads a Node or its Lease.
func Read(resource string, item []byte) (name string, o Object, err error) {
	var obj map[string]any
	d := json.NewDecoder(bytes.NewReader(item))
	d.UseNumber()
	if err := d.Decode(&obj); err != nil {
		return "", o, fmt.Errorf("reading an item of the list: %w", err)
	}
	meta, _ := obj["metadata"].(map[string]any)
	text := func(key string) string { s, _ := meta[key].(string); return s }
	name = strings.TrimPrefix(text("namespace")+"/"+text("name"), "/")
	if o.Revision, err = strconv.ParseUint(text("resourceVersion"), 10, 64); err != nil {
		return name, o, fmt.Errorf("%s: resourceVersion %q: %w", name, text("resourceVersion"), err)
	}
	switch {
	case resource == "nodes":
		withoutHeartbeats(obj)
	case resource == "leases.coordination.k8s.io" && text("namespace") == "kube-node-lease":
		if spec, _ := obj["spec"].(map[string]any); spec != nil {
			delete(spec, "renewTime")
			delete(spec, "leaseDurationSeconds") // it comes with the other
		}
	}
	raw, err := json.Marshal(obj) // the keys of maps are in order
	o.Sum = sha256.Sum256(raw)
	return name, o, err
}

// withoutHeartbeats takes out of a Node when it was heard.
func withoutHeartbeats(node map[string]any) {
	status, _ := node["status"].(map[string]any)
	conditions, _ := status["conditions"].([]any)
	for _, c := range conditions {
		if c, ok := c.(map[string]any); ok {
			delete(c, "lastHeartbeatTime")
		}
	}
}
