// Package definitions contains CustomResourceDefinitions of other projects and installs them into a
// cluster on request. Each project has a folder with its unchanged files and its license. Tests
// compare the folders with the modules that go.mod pins.
//
// The definitions are part of kctl and not of the control plane. Every served kind costs memory on
// every replica. Charts that detect Gateway API would create other objects in clusters in which no
// user requested it.
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

// mostUnpacked is the maximum size of the definitions of a bundle, in bytes of YAML.
const mostUnpacked = 16 << 20

// releaseOfOurs is the annotation for the release of definitions if their project does not record a
// release in them.
const releaseOfOurs = "keelson.dev/release"

// Bundle contains the definitions of one release of a project.
type Bundle struct {
	Name    string // name and folder of the bundle, such as "gateway"
	Module  string // Go module that contains the definitions
	Release string // release of the module, such as "v1.6.3"
	// Files are paths within the module, in the order in which they are installed.
	Files []string
	// ReleaseKey and ChannelKey are the annotations in which a definition records its release and
	// its stability channel. Either is empty if the project has no such annotation.
	ReleaseKey, ChannelKey string
	// Notes are annotations for Keelson's controllers that are added to each definition.
	Notes map[string]string
}

// Gateway contains the kinds of the standard channel of Gateway API that Keelson's controller
// serves.
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

// Snapshot contains the kinds for snapshots of volumes and of volume groups. Its annotation lets
// the control plane serve them. Users with a snapshot controller of their own install definitions
// without that annotation.
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

// All lists all bundles.
var All = []Bundle{Gateway, Snapshot}

// packed returns the path of the compressed definitions.
func (b Bundle) packed() string { return b.Name + "/definitions.yaml.gz" }

// YAML returns the unchanged definitions of the project, one document each.
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

// Definitions returns the objects to install. Each has an annotation with its release.
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
