package recovery

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/mvcc"
)

// mostPlaces bounds how many places of a backup are told apart; what is in others is counted as one.
const mostPlaces = 2000

// elsewhere is where the objects of all further places are counted.
const elsewhere = "..."

// contents counts what a state holds by the places where objects lie. Built-in kinds are known by what all says; of a group
// with a dot in its name, which only custom resources have, the key itself tells group and resource.
func contents(v *mvcc.View, all []*api.Kind) []api.ClusterBackupKind {
	known := map[string]*api.Kind{}
	for _, k := range all {
		if k.Storage != nil && known[k.Storage.Prefix] == nil {
			known[k.Storage.Prefix] = k
		}
	}
	found := map[string]*api.ClusterBackupKind{}
	count := func(it raftstore.Item) {
		place, group, resource := placeOf(it.Key, known)
		at := found[place]
		if at == nil && len(found) >= mostPlaces {
			place, group, resource = elsewhere, "", ""
			at = found[place]
		}
		if at == nil {
			at = &api.ClusterBackupKind{Place: place, Group: group, Resource: resource}
			if k := known[place]; k != nil {
				at.Version, at.Hidden = k.Storage.Hub.GVK.Version, k.Hidden
			}
			found[place] = at
		}
		at.Objects++
		if it.Expires != 0 {
			at.Expiring++
		}
		at.Bytes += int64(len(it.Key) + len(it.Value))
	}
	after := ""
	for {
		page, err := v.List("", raftstore.ListOptions{After: after, Limit: 1000})
		if err != nil { // only of a state that is not the newest
			break
		}
		for _, it := range page.Items {
			count(it)
		}
		if !page.More {
			break
		}
		after = page.Items[len(page.Items)-1].Key
	}
	out := make([]api.ClusterBackupKind, 0, len(found))
	for _, one := range found {
		out = append(out, *one)
	}
	slices.SortFunc(out, func(a, b api.ClusterBackupKind) int { return cmp.Compare(a.Place, b.Place) })
	return out
}

// placeOf is where the object of a key lies, and of which resource it is; "" for records of the cluster itself.
func placeOf(key string, known map[string]*api.Kind) (place, group, resource string) {
	rest, ok := strings.CutPrefix(key, api.StorageRoot)
	if !ok {
		return elsewhere, "", ""
	}
	first, rest, more := strings.Cut(rest, "/")
	place = api.StorageRoot + first + "/"
	if k := known[place]; k != nil {
		return place, k.Storage.Hub.GVK.Group, k.Resource
	}
	second, _, deeper := strings.Cut(rest, "/")
	if !more || !deeper || !strings.Contains(first, ".") {
		return place, "", ""
	}
	place += second + "/"
	if k := known[place]; k != nil {
		return place, k.Storage.Hub.GVK.Group, k.Resource
	}
	if first == ownRecords {
		return api.StorageRoot + first + "/", "", ""
	}
	return place, first, second
}

// ownRecords is where the cluster keeps what is no object: reservations, the feature level, the exchange of a key.
const ownRecords = "keelson.dev"

// DescribeBackup is what a person is told of a backup; v is nil where it could not be opened.
func DescribeBackup(i disk.BackupInfo, v *mvcc.View, all []*api.Kind) api.ClusterBackup {
	out := api.ClusterBackup{
		Cluster: i.Cluster, Revision: uint64(i.Revision), Keys: i.Keys, Bytes: i.Bytes, Format: i.Format, Sealed: i.Sealed, KeyID: i.KeyID,
	}
	if i.Created != (time.Time{}) {
		out.Created = i.Created.UnixMilli()
	}
	if v == nil {
		return out
	}
	out.Kinds = contents(v, all)
	if it, ok := v.Get(datadir.LevelKey); ok {
		if rec, err := datadir.DecodeLevel(it.Value); err == nil {
			out.FeatureLevel = rec.Level
		}
	}
	return out
}

// BuiltInKinds are the kinds that every cluster has.
func BuiltInKinds() []*api.Kind { return kinds.All().All() }
