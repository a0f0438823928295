// Package definitions contains CustomResourceDefinitions (CRDs) that other projects publish, such
// as Gateway API, and installs them into a cluster on request. Each project has a directory with
// its license and its unchanged CRDs. Tests compare each directory with the Go module that go.mod
// pins. kctl contains the CRDs, so that the control plane serves their kinds only after a user
// installs them. Every served kind costs memory on every replica. Helm charts that detect Gateway
// API would create other objects in clusters in which no user requested it.
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

// bundleFolders contains a folder for each bundle, with its license and its CRDs.
//
//go:embed gateway snapshot
var bundleFolders embed.FS

// maxUnpackedBytes is the maximum size of a bundle's CustomResourceDefinitions after decompression,
// in bytes of YAML.
const maxUnpackedBytes = 16 << 20

// releaseAnnotation is the annotation of a CustomResourceDefinition (CRD) in which kctl records the
// release of the project that publishes the CRD. kctl uses it only if that project has no such
// annotation of its own (Bundle.ReleaseKey).
const releaseAnnotation = "keelson.dev/release"

// Bundle describes the CustomResourceDefinitions (CRDs) from one release of an upstream project,
// such as Gateway API.
type Bundle struct {
	Name    string // name and folder of the bundle, such as "gateway"
	Module  string // Go module of the upstream project
	Release string // release of the Go module, such as "v1.6.3"
	// Files are the paths of the CRDs within the Go module, in the order of installation.
	Files []string
	// ReleaseKey and ChannelKey are the annotations in which the upstream CRDs record their release
	// and their channel (standard or experimental). Either is empty if the upstream project has no
	// such annotation.
	ReleaseKey, ChannelKey string
	// ExtraAnnotations are annotations that Definitions adds to each CRD. Keelson's controllers
	// read them.
	ExtraAnnotations map[string]string
}

// Gateway is the bundle of the Gateway API: the kinds of the standard channel that Keelson's
// controller supports.
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

// Snapshot is the bundle of the kinds for snapshots of volumes and of volume groups. Keelson's
// control plane processes objects of these kinds only if their CRDs have the annotation in
// ExtraAnnotations. Users with another snapshot controller install CRDs without that annotation.
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
	ExtraAnnotations: map[string]string{"keelson.dev/served-by": "control-plane"},
}

// All contains every bundle.
var All = []Bundle{Gateway, Snapshot}

// packedPath returns the path, in bundleFolders, of the bundle's CRDs, which are compressed with
// gzip.
func (b Bundle) packedPath() string { return b.Name + "/definitions.yaml.gz" }

// YAML returns the unchanged CRDs of the upstream project as a stream of YAML documents.
func (b Bundle) YAML() ([]byte, error) {
	data, err := bundleFolders.ReadFile(b.packedPath())
	if err != nil {
		return nil, fmt.Errorf("reading the definitions of %s: %w", b.Name, err)
	}
	return unpackDefinitions(data)
}

func unpackDefinitions(data []byte) ([]byte, error) {
	z, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		return nil, fmt.Errorf("unpacking definitions: %w", err)
	}
	out, err := io.ReadAll(io.LimitReader(z, maxUnpackedBytes+1))
	if err != nil {
		return nil, fmt.Errorf("unpacking definitions: %w", err)
	}
	if len(out) > maxUnpackedBytes {
		return nil, fmt.Errorf("unpacking definitions: they are larger than %d bytes", maxUnpackedBytes)
	}
	return out, nil
}

// Definitions returns the CRDs to install. Each CRD has an annotation with its release and the
// annotations in b.ExtraAnnotations, and has no status.
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
		maps.Copy(notes, b.ExtraAnnotations)
		u.SetAnnotations(notes)
		out = append(out, u)
	}
}

func (b Bundle) releaseKey() string {
	if b.ReleaseKey == "" {
		return releaseAnnotation
	}
	return b.ReleaseKey
}
