// Package definitions holds CustomResourceDefinitions that other projects publish, and brings them to a cluster that
// asks for them. They are data of those projects, word for word, in a folder each with its licence; the folders are
// compared with the modules that go.mod pins whenever the tests run.
//
// They are part of kctl and not of the control plane: a kind that is served costs every replica memory, and charts that
// look whether Gateway API is there would change what they make in clusters that never asked for it.
package definitions

import (
	"bytes"
	"compress/gzip"
	"embed"
	"errors"
	"fmt"
	"io"
	"maps"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
)

//go:embed gateway snapshot
var folders embed.FS

// mostUnpacked bounds a folder's definitions, in bytes of YAML.
const mostUnpacked = 16 << 20

// releaseOfOurs is the annotation that says the release of definitions whose project says none in them.
const releaseOfOurs = "keelson.dev/release"

// Bundle is the definitions of one project in one release.
type Bundle struct {
	Name    string // "gateway": also its folder
	Module  string // the Go module that they are part of
	Release string // "v1.6.3": the release of the module
	// Files are paths within the module, in the order in which they are installed.
	Files []string
	// ReleaseKey is the annotation in which a definition says its release, ChannelKey the one in which it says how stable
	// it is; either is "" where the project has none.
	ReleaseKey, ChannelKey string
	// Notes are annotations for this cluster's controllers that the definitions are given besides.
	Notes map[string]string
}

// Gateway is the standard channel of Gateway API, of which it has the kinds that Keelson's controller serves.
var Gateway = Bundle{
	Name: "gateway", Module: "sigs.k8s.io/gateway-api", Release: "v1.6.3",
	Files: []string{
		"config/crd/standard/gateway.networking.k8s.io_gatewayclasses.yaml",
		"config/crd/standard/gateway.networking.k8s.io_gateways.yaml",
		"config/crd/standard/gateway.networking.k8s.io_httproutes.yaml",
		"config/crd/standard/gateway.networking.k8s.io_grpcroutes.yaml",
		"config/crd/standard/gateway.networking.k8s.io_referencegrants.yaml",
	},
	ReleaseKey: "gateway.networking.k8s.io/bundle-version", ChannelKey: "gateway.networking.k8s.io/channel",
}

// Snapshot is the kinds of snapshots of volumes and of groups of them. The note has the control plane bind them: who runs a snapshot controller
// of his own brings definitions without it.
var Snapshot = Bundle{
	Name: "snapshot", Module: "github.com/kubernetes-csi/external-snapshotter/client/v8", Release: "v8.7.0",
	Files: []string{
		"config/crd/snapshot.storage.k8s.io_volumesnapshotclasses.yaml",
		"config/crd/snapshot.storage.k8s.io_volumesnapshotcontents.yaml",
		"config/crd/snapshot.storage.k8s.io_volumesnapshots.yaml",
		"config/crd/groupsnapshot.storage.k8s.io_volumegroupsnapshotclasses.yaml",
		"config/crd/groupsnapshot.storage.k8s.io_volumegroupsnapshotcontents.yaml",
		"config/crd/groupsnapshot.storage.k8s.io_volumegroupsnapshots.yaml",
	},
	Notes: map[string]string{"keelson.dev/served-by": "control-plane"},
}

// All are the bundles that there are.
var All = []Bundle{Gateway, Snapshot}

// packed is where the definitions lie.
func (b Bundle) packed() string { return b.Name + "/definitions.yaml.gz" }

// YAML is the definitions as their project wrote them, one document each.
func (b Bundle) YAML() ([]byte, error) {
	data, err := folders.ReadFile(b.packed())
	if err != nil {
		return nil, fmt.Errorf("reading the definitions of %s: %w", b.Name, err)
	}
	return unpack(data)
}

func unpack(data []byte) ([]byte, error) {
	z, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		return nil, fmt.Errorf("unpacking definitions: %w", err)
	}
	out, err := io.ReadAll(io.LimitReader(z, mostUnpacked+1))
	if err != nil {
		return nil, fmt.Errorf("unpacking definitions: %w", err)
	}
	if len(out) > mostUnpacked {
		return nil, fmt.Errorf("unpacking definitions: they are larger than %d bytes", mostUnpacked)
	}
	return out, nil
}

// Definitions are the objects that are installed, each with an annotation that says its release.
func (b Bundle) Definitions() ([]*unstructured.Unstructured, error) {
	text, err := b.YAML()
	if err != nil {
		return nil, err
	}
	var out []*unstructured.Unstructured
	for d := utilyaml.NewYAMLOrJSONDecoder(bytes.NewReader(text), 4096); ; {
		u := &unstructured.Unstructured{}
		if err := d.Decode(&u.Object); errors.Is(err, io.EOF) {
			return out, nil
		} else if err != nil {
			return nil, fmt.Errorf("reading the definitions of %s: %w", b.Name, err)
		}
		if len(u.Object) == 0 {
			continue
		}
		unstructured.RemoveNestedField(u.Object, "status")
		notes := u.GetAnnotations()
		if notes == nil {
			notes = map[string]string{}
		}
		if notes[b.releaseKey()] == "" {
			notes[b.releaseKey()] = b.Release
		}
		maps.Copy(notes, b.Notes)
		u.SetAnnotations(notes)
		out = append(out, u)
	}
}

func (b Bundle) releaseKey() string {
	if b.ReleaseKey == "" {
		return releaseOfOurs
	}
	return b.ReleaseKey
}
