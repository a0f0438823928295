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

// maxKeyPrefixes is the maximum number of key prefixes for which objects are counted separately.
// The objects with all further key prefixes are counted together.
const maxKeyPrefixes = 2000

// otherPrefixes is shown instead of a key prefix for the objects beyond maxKeyPrefixes, which are
// counted together.
const otherPrefixes = "..."

// countByKeyPrefix counts the objects in v by the key prefix of their resource, such as
// /registry/pods/. The key prefix of a custom resource contains its API group and its plural name.
// The result also contains the group and the resource of each prefix that belongs to one of
// knownKinds or to a custom resource.
func countByKeyPrefix(v *mvcc.View, knownKinds []*api.Kind) []api.ClusterBackupKind {
	known := map[string]*api.Kind{}
	for _, k := range knownKinds {
		if k.Storage != nil && known[k.Storage.Prefix] == nil {
			known[k.Storage.Prefix] = k
		}
	}
	found := map[string]*api.ClusterBackupKind{}
	count := func(it raftstore.Item) {
		prefix, group, resource := parseKeyPrefix(it.Key, known)
		at := found[prefix]
		if at == nil && len(found) >= maxKeyPrefixes {
			prefix, group, resource = otherPrefixes, "", ""
			at = found[prefix]
		}
		if at == nil {
			at = &api.ClusterBackupKind{Place: prefix, Group: group, Resource: resource}
			if k := known[prefix]; k != nil {
				at.Version, at.Hidden = k.Storage.Hub.GVK.Version, k.Serving.Hidden
			}
			found[prefix] = at
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
		if err != nil { // happens only if v is not the newest state
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

// parseKeyPrefix returns the key prefix of the resource to which key, the key of an object in the
// store, belongs. It also returns the API group and the name of that resource. known maps the
// prefixes of known kinds to the kinds; the group and resource of custom resources are parsed from
// key. The group and resource are empty for records that are not API objects.
func parseKeyPrefix(key string, known map[string]*api.Kind) (prefix, group, resource string) {
	rest, ok := strings.CutPrefix(key, api.StorageRoot)
	if !ok {
		return otherPrefixes, "", ""
	}
	first, rest, more := strings.Cut(rest, "/")
	prefix = api.StorageRoot + first + "/"
	if k := known[prefix]; k != nil {
		return prefix, k.Storage.Hub.GVK.Group, k.Resource
	}
	second, _, deeper := strings.Cut(rest, "/")
	if !more || !deeper || !strings.Contains(first, ".") {
		return prefix, "", ""
	}
	prefix += second + "/"
	if k := known[prefix]; k != nil {
		return prefix, k.Storage.Hub.GVK.Group, k.Resource
	}
	if first == clusterRecords {
		return api.StorageRoot + first + "/", "", ""
	}
	return prefix, first, second
}

// clusterRecords is the part of the key, in place of an API group, of records that are not API
// objects. Such records are the feature level and the key rotation.
const clusterRecords = "keelson.dev"

// DescribeBackup returns the description of a backup with the header i and the state v. v is nil if
// the backup could not be decrypted. The description names the API group and the resource of the
// objects of knownKinds and of custom resources.
func DescribeBackup(i disk.BackupInfo, v *mvcc.View, knownKinds []*api.Kind) api.ClusterBackup {
	out := api.ClusterBackup{
		Cluster: i.Cluster, Revision: uint64(i.Revision), Keys: i.Keys, Bytes: i.Bytes, Format: i.Format,
		Sealed: i.Sealed, KeyID: i.KeyID,
	}
	if i.Created != (time.Time{}) {
		out.Created = i.Created.UnixMilli()
	}
	if v == nil {
		return out
	}
	out.Kinds = countByKeyPrefix(v, knownKinds)
	if it, ok := v.Get(datadir.LevelKey); ok {
		if rec, err := datadir.DecodeLevel(it.Value); err == nil {
			out.FeatureLevel = rec.Level
		}
	}
	return out
}

// BuiltInKinds returns the kinds of the built-in APIs, which every cluster has.
func BuiltInKinds() []*api.Kind { return kinds.All().All() }
