package kctl

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/rest"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/diskheadroom"
	"keelson.dev/keelson/kctl/backupfile"
	"keelson.dev/keelson/kctl/verb"
)

func backupCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	var to []string
	toFile, beside := "", ""
	c := &cobra.Command{
		Use:   "backup FILE",
		Short: "Back up the store to a file while the cluster serves requests",
		Long: "Back up the store to a file while the cluster serves requests. The backup is as recent as a read\n" +
			"at the time of the call.\n" +
			"\n" +
			"The backup is written to FILE.partial. It is renamed to FILE after it is complete and its checksum\n" +
			"is verified. If the backup fails or is interrupted, FILE.partial is removed. An existing backup\n" +
			"FILE is replaced by the rename. An existing file that is not a backup is never replaced. If FILE\n" +
			"is '-', the backup is written to standard output.\n" +
			"\n" +
			"The cluster's CA and keys (pki in the data directory of each replica) are not part of the backup.\n" +
			"Store a copy of them in another safe place. A backup is encrypted with the store's key, or with\n" +
			"age if a recipient is given. A backup encrypted with age can be read only with an identity of one\n" +
			"of its recipients. To restore a backup, see 'kctl cluster restore --help'.",
		Example: "  # Back up the store to a file\n" +
			"  kctl cluster backup /backups/today\n" +
			"\n" +
			"  # Back up the store to another machine\n" +
			"  kctl cluster backup - | ssh vault 'cat > today'\n" +
			"\n" +
			"  # Encrypt the backup with age\n" +
			"  kctl cluster backup /backups/today --recipient age1...\n" +
			"\n" +
			"  # Verify a backup\n" +
			"  kctl cluster backup verify /backups/today",
		Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			if toFile != "" {
				of, err := readRecipients(toFile)
				if err != nil {
					return fmt.Errorf("--recipients-file: %w", err)
				}
				to = append(to, of...)
			}
			for _, r := range to {
				if !strings.HasPrefix(r, "age1") { // perhaps a private age identity: do not send it
					return errors.New("--recipient: want an age recipient, which starts with age1")
				}
			}
			return writeBackup(f, streams, args[0], to, diskheadroom.Target{ProtectedPath: beside})
		},
	}
	c.Flags().StringArrayVar(&to, "recipient", nil, "age recipient (age1...) that can decrypt the backup (repeatable)")
	c.Flags().StringVar(&toFile, "recipients-file", "",
		"file of age recipients that can decrypt the backup, one per line")
	c.Flags().StringVar(&beside, "data-dir", defaultDataDir,
		"data directory of a replica on this machine; the backup fails before it fills the disk space that is "+
			"reserved for this replica")
	verify := &cobra.Command{
		Use:   "verify FILE",
		Short: "Verify that a backup is complete, and show a summary",
		Long: "Verify that a backup is complete, and show its cluster, revision, size and format.\n" +
			"\n" +
			"If keelson-controlplane is installed beside kctl, the backup is verified on this machine.\n" +
			"Otherwise kctl sends the file to a replica, which does not store it. An encrypted backup is also\n" +
			"sent to a replica unless --encryption-keys is given, because replicas have the keys.",
		Example: "  kctl cluster backup verify /backups/today\n" +
			"  kctl cluster backup verify --encryption-keys /etc/keelson/keys /backups/today",
		DisableFlagParsing: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, cancel := verb.WithSignals()
			defer cancel()
			if _, err := os.Stat(daemonProgram()); err == nil && !(len(args) == 1 && isEncryptedBackup(args[0])) {
				return execDaemonVerb(append([]string{"verify"}, args...))
			}
			if len(args) != 1 || args[0] == "--help" || args[0] == "-h" {
				return cmd.Help()
			}
			return verifyAtServer(ctx, f, streams, args[0])
		},
	}
	c.AddCommand(verify, inspectBackupCommand(f, streams))
	for _, v := range [][3]string{
		{"list", "List the scheduled backups in their directory or bucket, newest first",
			"backup list --backup-folder /backups"},
		{"fetch FILE", "Copy a scheduled backup (default: the newest) from its directory or bucket to FILE",
			"backup fetch /root/newest"},
		{"serve", "Serve the API of a backup on this machine's loopback address", "backup serve /backups/today"},
	} {
		c.AddCommand(daemonVerb(v[0], v[1], v[2], "backup"))
	}
	return c
}

func inspectBackupCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	return &cobra.Command{
		Use:   "inspect [FILE]",
		Short: "Inspect a backup: its cluster, its revision and the number of objects of each kind",
		Long: "Inspect a backup: show its cluster, its time, its revision, the key that it requires, and the\n" +
			"number of objects of each kind. Nothing is changed.\n" +
			"\n" +
			"If keelson-controlplane is installed beside kctl, the backup is read on this machine. Otherwise\n" +
			"kctl sends the file to a replica, which does not store it.",
		Example: "  kctl cluster backup inspect /backups/today\n  kctl cluster backup inspect " +
			"/backups/today --encryption-keys /etc/keelson/keys",
		DisableFlagParsing: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			if _, err := os.Stat(daemonProgram()); err == nil {
				return execDaemonVerb(append([]string{"backup", "inspect"}, args...))
			}
			if len(args) != 1 || args[0] == "--help" || args[0] == "-h" {
				return cmd.Help()
			}
			ctx, cancel := verb.WithSignals()
			defer cancel()
			b, err := describeAtServer(ctx, f, args[0])
			if err != nil {
				return err
			}
			return printBackup(streams.Out, args[0], b)
		},
	}
}

// printBackup writes to w a one-line summary of backup b, and a table with the number and size of
// its objects by kind. path is the backup file.
func printBackup(w io.Writer, path string, b api.ClusterBackup) error {
	fmt.Fprintln(w, backupSummary(path, b))
	t := tabwriter.NewWriter(w, 0, 8, 3, ' ', 0)
	fmt.Fprintln(t, "RESOURCE\tOBJECTS\tSIZE")
	for _, k := range b.Kinds {
		name := cmp.Or(k.Resource, k.Place)
		if k.Group != "" {
			name += "." + k.Group
		}
		fmt.Fprintf(t, "%s\t%d\t%s\n", name, k.Objects, formatSize(k.Bytes))
	}
	return t.Flush()
}

// writeBackup writes a backup from a replica to the file path, or to standard output if path is
// "-". If recipients is not empty, the backup is encrypted with age for these recipients. The file
// gets its name only after it is complete and its checksum is verified. If the transfer fails or a
// signal interrupts it, the partial file is removed. If the file is on the same disk as
// disk.ProtectedPath, the space that is reserved for that path (the disk headroom) stays free.
func writeBackup(
	f cmdutil.Factory, streams genericiooptions.IOStreams, path string, recipients []string, disk diskheadroom.Target,
) error {
	if path == "-" {
		// Standard output needs no cleanup, so signals keep their default effect.
		n, err := receiveBackup(context.Background(), f, recipients, streams.Out, streams.ErrOut)
		if err == nil {
			fmt.Fprintf(streams.ErrOut, "%s written\n", formatSize(n))
		}
		return err
	}
	ctx, cancel := verb.WithSignals(syscall.SIGHUP)
	defer cancel()
	var former int64 // size of the existing backup, which stays until the new one is complete
	if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() {
		former = info.Size()
	}
	disk.Dir = filepath.Dir(path)
	if resolved, err := filepath.EvalSymlinks(path); err == nil {
		disk.Dir = filepath.Dir(resolved) // the target of the symbolic link is replaced
	}
	if err := disk.CheckFree(former); err != nil {
		return fmt.Errorf("cannot back up to %s: %w", path, err)
	}
	out, err := backupfile.CreateFile(path, len(recipients) > 0)
	if err != nil {
		return err
	}
	n, err := receiveBackup(ctx, f, recipients, disk.Writer(out), streams.ErrOut)
	if err == nil {
		err = out.Commit()
	}
	var stopped *verb.Interruption
	switch {
	case err == nil:
		fmt.Fprintf(streams.ErrOut, "%s: %s, checked\n", path, formatSize(n))
		return nil
	case errors.As(context.Cause(ctx), &stopped):
		err = fmt.Errorf("%w after %s: %s was not written", stopped, formatSize(n), path)
	default:
		err = fmt.Errorf("cannot back up to %s: %w", path, err)
	}
	return errors.Join(err, out.Discard())
}

// defaultDataDir is the default data directory of a control-plane replica.
const defaultDataDir = "/var/lib/keelson/controlplane"

// maxRecipients is the maximum size, in bytes, of the file that --recipients-file names.
const maxRecipients = 64 << 10

// readRecipients returns the age recipients (public keys) in the file at path, which has one per
// line. Empty lines and comments are skipped. It fails if a line does not start with age1, or if
// there is no recipient. The replica validates the recipients.
func readRecipients(path string) (out []string, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxRecipients+1))
	if err == nil && len(text) > maxRecipients {
		err = fmt.Errorf("%s is larger than %d bytes", path, maxRecipients)
	}
	if err != nil {
		return nil, err
	}
	number := 0
	for line := range strings.Lines(string(text)) {
		number++
		line = strings.TrimSpace(line)
		switch {
		case line == "" || strings.HasPrefix(line, "#"):
		case !strings.HasPrefix(line, "age1"): // perhaps a private age identity: do not send it
			return nil, fmt.Errorf("%s: line %d is not an age recipient, which starts with age1", path, number)
		default:
			out = append(out, line)
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%s contains no recipient", path)
	}
	return out, nil
}

// receiveBackup requests a backup from a replica, copies it to w, and returns the number of bytes
// copied. If recipients is not empty, the backup is encrypted with age for these recipients. It
// fails if the checksum of the copied bytes differs from the checksum in the trailer of the
// response. Every progressInterval, it writes a line with the number of bytes to progress.
func receiveBackup(ctx context.Context, f cmdutil.Factory, recipients []string, w, progress io.Writer) (int64, error) {
	resp, err := postStream(ctx, f, api.PathClusterBackup, url.Values{"recipient": recipients}, nil)
	if err != nil {
		return 0, fmt.Errorf("requesting a backup: %w", err)
	}
	defer resp.Body.Close()
	sum := sha256.New()
	n, err := io.Copy(io.MultiWriter(w, sum),
		&progressReader{r: resp.Body, w: progress, next: time.Now().Add(progressInterval)})
	if err != nil {
		return n, fmt.Errorf("the backup was interrupted after %s: %w", formatSize(n), err)
	}
	switch want := resp.Trailer.Get(api.HeaderBackupSum); {
	case want == "":
		return n, fmt.Errorf("the backup was interrupted after %s: its checksum is missing", formatSize(n))
	case want != hex.EncodeToString(sum.Sum(nil)):
		return n, errors.New("the backup was damaged in transit: its checksum does not match")
	}
	return n, nil
}

// progressInterval is the time between two progress lines of a backup transfer. Each line contains
// the number of bytes so far.
const progressInterval = 2 * time.Second

type progressReader struct {
	r    io.Reader
	w    io.Writer
	n    int64
	next time.Time
}

// Read reads from r.r. Once per progressInterval, it writes the number of bytes read so far to r.w.
func (r *progressReader) Read(p []byte) (int, error) {
	n, err := r.r.Read(p)
	r.n += int64(n)
	if now := time.Now(); now.After(r.next) {
		r.next = now.Add(progressInterval)
		fmt.Fprintf(r.w, "%s\n", formatSize(r.n))
	}
	return n, err
}

// isEncryptedBackup reports whether the file at path starts with the header of a backup that is
// encrypted with the store's key. Such a backup can be verified by a replica, which has the key.
func isEncryptedBackup(path string) bool {
	in, err := os.Open(path)
	if err != nil {
		return false
	}
	defer in.Close()
	head := make([]byte, 1024)
	n, _ := io.ReadFull(in, head) // a shorter or unreadable file is not encrypted
	return bytes.HasPrefix(head[:n], []byte(api.BackupMagic)) && bytes.Contains(head[:n], []byte(api.BackupSealedMark))
}

func verifyAtServer(ctx context.Context, f cmdutil.Factory, streams genericiooptions.IOStreams, path string) error {
	b, err := describeAtServer(ctx, f, path)
	if err == nil {
		fmt.Fprintln(streams.Out, backupSummary(path, b))
	}
	return err
}

// maxDescriptionBytes is the maximum size, in bytes, of a replica's response that describes a
// backup.
const maxDescriptionBytes = 4 << 20

// describeAtServer sends the backup file at path to a replica. The replica verifies the backup and
// returns its description: cluster, revision, and objects by kind.
func describeAtServer(ctx context.Context, f cmdutil.Factory, path string) (b api.ClusterBackup, err error) {
	in, err := os.Open(path)
	if err != nil {
		return b, err
	}
	defer in.Close()
	resp, err := postStream(ctx, f, api.PathClusterVerify, nil, in)
	if err != nil {
		return b, fmt.Errorf("%s: %w", path, err)
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxDescriptionBytes)).Decode(&b); err != nil {
		return b, fmt.Errorf("%s: unexpected response: %w", path, err)
	}
	return b, nil
}

// backupSummary returns a one-line description of backup b: its cluster, revision, time, size and
// format. path is the backup file.
func backupSummary(path string, b api.ClusterBackup) string {
	sealed := ""
	if b.Sealed {
		sealed = ", encrypted"
	}
	return fmt.Sprintf("%s: whole. Cluster %s at revision %d of %s, %d keys, %s, format %d%s",
		path, b.Cluster, b.Revision, time.UnixMilli(b.Created).UTC().Format(time.RFC3339), b.Keys, formatSize(b.Bytes),
		b.Format, sealed)
}

// postStream sends a POST request to a path of the API, with a body and a response that are
// streamed. It is used for bodies and responses that are too large for memory. It returns an error
// for every status other than 200. The caller closes the body of the response.
func postStream(ctx context.Context, f cmdutil.Factory, path string, query url.Values, body io.Reader) (
	*http.Response, error,
) {
	cfg, err := f.ToRESTConfig()
	if err != nil {
		return nil, err
	}
	client, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return nil, err
	}
	base, _, err := rest.DefaultServerUrlFor(cfg)
	if err != nil {
		return nil, err
	}
	to := base.JoinPath(path)
	to.RawQuery = query.Encode()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, to.String(), body)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		defer resp.Body.Close()
		raw, _ := io.ReadAll(io.LimitReader(resp.Body, 4096))
		var s struct{ Message string }
		if json.Unmarshal(raw, &s) == nil && s.Message != "" {
			return nil, errors.New(s.Message)
		}
		return nil, errors.New(resp.Status)
	}
	return resp, nil
}
