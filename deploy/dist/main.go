// Command dist packages the output of 'make dist' for one architecture. It writes a tarball, a
// Debian package, the images for the cluster's own pods, and a software bill of materials
// (CycloneDX). The same input always gives the same bytes.
//
//	dist -root bin/dist/amd64 -install deploy/install -images entry.tar -out bin/dist -arch amd64 -version v1.2.3 -epoch 1700000000
//	dist -sums bin/dist -version v1.2.3
package main

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"time"
)

// release is the release to package.
type release struct {
	version string
	arch    string
	root    string // folder with usr/bin and opt/cni/bin
	install string // folder with units, settings, and scripts
	images  []string
	linked  []string // NAME=LIBRARY@VERSION of C libraries, which Go's build information does not contain
	out     string
	when    time.Time
}

type repeated struct{ to *[]string }

func (r repeated) String() string     { return "" }
func (r repeated) Set(s string) error { *r.to = append(*r.to, s); return nil }

func main() {
	var r release
	var epoch int64
	flag.StringVar(&r.version, "version", "", "the release's version, as the programs tell it")
	flag.StringVar(&r.arch, "arch", "amd64", "amd64 or arm64")
	flag.StringVar(&r.root, "root", "", "folder that holds usr/bin and opt/cni/bin")
	flag.StringVar(&r.install, "install", "", "folder of units, settings and scripts")
	flag.Var(repeated{&r.images}, "images", "archive of images for machines that reach no registry (repeatable)")
	flag.Var(repeated{&r.linked}, "linked",
		"PROGRAM=LIBRARY@VERSION: a library of C that is linked to a program (repeatable)")
	flag.StringVar(&r.out, "out", "", "folder for what is made")
	flag.Int64Var(&epoch, "epoch", 0, "the time of every file, in seconds: that of the commit")
	sums := flag.String("sums", "", "only write SHA256SUMS of what is in this folder of -version")
	flag.Parse()
	r.when = time.Unix(epoch, 0).UTC()
	err := error(nil)
	switch {
	case *sums != "":
		err = checksums(*sums, r.version)
	case r.version == "" || r.root == "" || r.install == "" || r.out == "" || epoch == 0:
		err = fmt.Errorf("-version, -root, -install, -out and -epoch are needed")
	case strings.ContainsAny(r.version, "/ \t\n"):
		err = fmt.Errorf("-version %q: want no spaces and no /", r.version)
	default:
		err = r.pack()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "dist:", err)
		os.Exit(1)
	}
}
